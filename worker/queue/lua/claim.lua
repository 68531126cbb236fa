-- Take up to `want` waiting jobs of one queue, oldest first. A running job stays in the sorted set: when its
-- lease runs out it can be claimed again.
-- KEYS  queue
-- ARGV  want, lease_ms, worker, lane, life_ms, most_body_bytes, only_id ('' for any)
-- Returns eight values a job: id, attempt, crashes, cancelled, queued_ms, events so far, body or '', body bytes.
local want, lease_ms, worker, lane, life_ms, most = tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local now, claimed, PAGE = milliseconds(), {}, 200

local function claim(id, score)
  local job, lease, body_key = 'sluice:job:' .. id, 'arq:in-progress:' .. id, 'arq:job:' .. id
  if redis.call('EXISTS', lease) == 1 then return end
  local state = redis.call('HGET', job, 'state')
  if FINAL[state] then  -- submitted again after it had ended: the ending stands
    redis.call('ZREM', KEYS[1], id)
    redis.call('DEL', body_key)
    return
  end
  local attempt = redis.call('HINCRBY', job, 'attempt', 1)
  local crashes = redis.call('HINCRBY', job, 'crashes', state == 'running' and 1 or 0)
  redis.call('SET', lease, worker .. ':' .. attempt, 'PX', lease_ms)
  redis.call('HSET', job, 'state', 'running', 'worker', worker, 'lane', lane, 'started_at', now / 1000)
  redis.call('PEXPIRE', job, life_ms)
  redis.call('PEXPIRE', 'sluice:log:' .. id, life_ms)
  local bytes = redis.call('STRLEN', body_key)
  local out = { id, attempt, crashes, redis.call('EXISTS', 'sluice:cancel:' .. id), score,
    redis.call('LLEN', 'sluice:log:' .. id), bytes <= most and redis.call('GET', body_key) or '', bytes }
  for _, value in ipairs(out) do claimed[#claimed + 1] = value end
  want = want - 1
end

if ARGV[7] ~= '' then
  local score = redis.call('ZSCORE', KEYS[1], ARGV[7])
  if score then claim(ARGV[7], score) end
  return claimed
end

local first = 0
while want > 0 do
  local page = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'WITHSCORES', 'LIMIT', first, PAGE)
  local before = redis.call('ZCARD', KEYS[1])
  for i = 1, #page, 2 do
    if want > 0 then claim(page[i], page[i + 1]) end
  end
  if #page < 2 * PAGE then break end
  first = first + PAGE - (before - redis.call('ZCARD', KEYS[1]))
end
return claimed
