-- Queue one job and wake the workers, unless its id is known or the lane is full.
-- KEYS  body, queue, job, wake channel, model
-- ARGV  id, body, life_ms, lane, tenant or '', deadline_s or '', prompt_cache_key or '', submission or ''
-- Returns 1 and 'queued'; 0 and the known job's state; or -1, the lane's length, its limit, and the seconds until
-- there will be room ('' where nothing has ended lately).
local state = redis.call('HGET', KEYS[3], 'state')
if state then  -- the same submission again, because the answer to it was lost, is as new as it was
  local is_ours = ARGV[8] ~= '' and redis.call('HGET', KEYS[3], 'submission') == ARGV[8]
  return { is_ours and 1 or 0, state }
end
if redis.call('EXISTS', KEYS[1]) == 1 then return { 0, 'queued' } end

local now_ms = milliseconds()

-- Each worker of the model says its limit and its rate in this hash: 'limit jobs_per_s valid_until'.
local length, limit, rate = redis.call('ZCARD', KEYS[2]), nil, 0
for _, said in ipairs(redis.call('HVALS', KEYS[5])) do
  local its_limit, its_rate, valid_until = string.match(said, '([%d.]+) ([%d.]+) (%d+)')
  if tonumber(valid_until) * 1000 > now_ms then
    limit = math.min(limit or math.huge, tonumber(its_limit))
    rate = rate + tonumber(its_rate)
  end
end
if limit and length >= limit then
  return { -1, length, limit, rate > 0 and tostring((length - limit + 1) / rate) or '' }
end

redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now_ms, ARGV[1])
redis.call('HSET', KEYS[3], 'state', 'queued', 'lane', ARGV[4], 'queued_at', now_ms / 1000)
if ARGV[5] ~= '' then redis.call('HSET', KEYS[3], 'tenant', ARGV[5]) end
local deadline = ARGV[6] ~= '' and now_ms / 1000 + ARGV[6] or nil
if deadline then redis.call('HSET', KEYS[3], 'deadline', deadline) end
if ARGV[7] ~= '' then redis.call('HSET', KEYS[3], 'prompt_cache_key', ARGV[7]) end
if ARGV[8] ~= '' then redis.call('HSET', KEYS[3], 'submission', ARGV[8]) end
redis.call('PEXPIRE', KEYS[3], ARGV[3])

local index = index_of(KEYS[2])
if redis.call('EXISTS', index.jobs) == 1 then -- where not, the next claim begins it
  in_index(wait_in_line, index, ARGV[1], now_ms, ARGV[5], deadline and deadline * 1000)
end
redis.call('PUBLISH', KEYS[4], '')
return { 1, 'queued' }
