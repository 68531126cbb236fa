-- Take up to `want` waiting jobs of one queue. A running job stays in the sorted set: when its lease runs out,
-- it can be claimed again.
-- KEYS  queue
-- ARGV  want, lease_ms, worker, lane, life_ms, most_body_bytes, whether lapsed leases may be taken over
--       (1 or 0), suspects on probation here, whether an earlier answer may have been lost (1 or 0),
--       number of jobs that this worker knows it runs, their ids, then tenant and its running rows, in pairs
-- Returns thirteen values a job: id, attempt, crashes, cancelled, queued_ms, events so far, body or '', body bytes,
--       tenant or '', lapses, expired, what an earlier attempt left out of its prompt or '', and what
--       tells the images that it saw from others or ''.
--
-- Of the oldest thousand that wait, each tenant's oldest in turn, beginning with the tenant that has the fewest
-- rows on this worker. A job whose deadline has passed is taken at once and beyond `want`: it only has to end.
-- A job that was running when its worker died is a suspect, on probation until the worker that took it over has
-- made a new token of it (after a second lapse, until its end). A worker has one job on probation at a time, and
-- a crash in that time counts: three, and the job is the culprit. Its neighbours' lapses do not.
local queue, want, lane, takeover, suspects = KEYS[1], tonumber(ARGV[1]), ARGV[4], ARGV[7] == '1', tonumber(ARGV[8])
local now, claimed, WINDOW, PAGE = milliseconds(), {}, 1000, 200
local answer_lost, known_ids, load = ARGV[9] == '1', {}, {}
for i = 11, 10 + tonumber(ARGV[10]) do known_ids[ARGV[i]] = true end
for i = 11 + tonumber(ARGV[10]), #ARGV, 2 do load[ARGV[i]] = tonumber(ARGV[i + 1]) end

-- A claim of ours whose answer was lost: the worker has never heard of it, so it has not begun.
local function never_heard(id, lease)
  local owner = redis.call('GET', lease)
  if not answer_lost or known_ids[id] or string.sub(owner, 1, #ARGV[3] + 1) ~= ARGV[3] .. ':' then return false end
  redis.call('HSET', 'sluice:job:' .. id, 'state', 'queued')
  redis.call('DEL', lease)
  return true
end

-- What is known of a waiting job, or nil if it may not be taken now.
local function look(id, score)
  local lease = 'arq:in-progress:' .. id
  if redis.call('EXISTS', lease) == 1 and not never_heard(id, lease) then return nil end
  local known = redis.pcall('HMGET', 'sluice:job:' .. id,
    'state', 'lapses', 'probation', 'tenant', 'deadline', 'crashes', 'attempt')
  for _, count in ipairs({ 2, 6, 7 }) do
    if known.err or (known[count] and not string.match(known[count], '^%d+$')) then
      redis.call('DEL', 'sluice:job:' .. id) -- not what we wrote
      known = {}
    end
  end
  if FINAL[known[1]] then -- submitted again after it had ended: the ending stands
    redis.call('ZREM', queue, id)
    redis.call('DEL', 'arq:job:' .. id)
    return nil
  end
  local lapsed = known[1] == 'running'
  if lapsed and not takeover then return nil end
  local guilty = lapsed and known[3] == '1'
  return { id = id, score = score, lapses = tonumber(known[2] or 0) + (lapsed and 1 or 0), tenant = known[4] or '',
    guilty = guilty, crashes = tonumber(known[6] or 0) + (guilty and 1 or 0), expired = (tonumber(known[5] or '') or math.huge) * 1000 < now }
end

local function claim(row)
  local id = row.id
  local job, body_key = 'sluice:job:' .. id, 'arq:job:' .. id
  local attempt = redis.call('HINCRBY', job, 'attempt', 1)
  local crashes = redis.call('HINCRBY', job, 'crashes', row.guilty and 1 or 0)
  if row.lapses > 0 then redis.call('HSET', job, 'lapses', row.lapses, 'probation', 1) end
  redis.call('SET', 'arq:in-progress:' .. id, ARGV[3] .. ':' .. attempt, 'PX', ARGV[2])
  redis.call('HSET', job, 'state', 'running', 'worker', ARGV[3], 'lane', lane, 'started_at', now / 1000)
  redis.call('PEXPIRE', job, ARGV[5])
  redis.call('PEXPIRE', 'sluice:log:' .. id, ARGV[5])
  local events, bytes = redis.pcall('LLEN', 'sluice:log:' .. id), redis.pcall('STRLEN', body_key)
  if type(events) ~= 'number' then redis.call('DEL', 'sluice:log:' .. id) events = 0 end -- foreign values: an error
  if type(bytes) ~= 'number' then bytes = 0 end -- here would hold up the whole queue
  local wanted = bytes > 0 and bytes <= tonumber(ARGV[6]) and not row.expired -- thousands may expire together
  local out = { id, attempt, crashes, redis.call('EXISTS', 'sluice:cancel:' .. id), row.score, events,
    wanted and redis.call('GET', body_key) or '', bytes, row.tenant, row.lapses, row.expired and 1 or 0,
    redis.call('HGET', job, 'specprefill') or '', redis.call('HGET', job, 'images') or '' }
  for _, value in ipairs(out) do claimed[#claimed + 1] = value end
end

-- The waiting jobs by tenant, oldest first, and the suspects apart. Enough have been seen when `want` tenants
-- without a row were.
local lines, order, accused, idle, seen, first = {}, {}, {}, 0, 0, 0

local function stand_in_line(row)
  seen = seen + 1
  if row.lapses > 0 then
    table.insert(accused, row)
    return
  end
  if not lines[row.tenant] then
    lines[row.tenant] = { head = 1 }
    order[#order + 1] = row.tenant
    if (load[row.tenant] or 0) == 0 then idle = idle + 1 end
  end
  table.insert(lines[row.tenant], row)
end

while seen < WINDOW and (idle < want or want == 0) do
  local page = redis.call('ZRANGEBYSCORE', queue, '-inf', now, 'WITHSCORES', 'LIMIT', first, PAGE)
  local before = redis.call('ZCARD', queue)
  for i = 1, #page, 2 do
    local row = look(page[i], page[i + 1])
    if row and row.expired then
      claim(row)
    elseif row then
      stand_in_line(row)
    end
  end
  if #page < 2 * PAGE then break end
  first = first + PAGE - (before - redis.call('ZCARD', queue))
end

local function take(row)
  load[row.tenant] = (load[row.tenant] or 0) + 1
  claim(row)
  want = want - 1
end

-- One suspect, those with the least against them first: should workers die for another reason, again and again,
-- no job is tried twice while others wait.
if want > 0 and suspects == 0 and #accused > 0 then
  table.sort(accused, function(a, b)
    if a.crashes ~= b.crashes then return a.crashes < b.crashes end
    return tonumber(a.score) < tonumber(b.score)
  end)
  take(accused[1])
end

while want > 0 do
  local best = nil
  for _, tenant in ipairs(order) do
    local row = lines[tenant][lines[tenant].head]
    local lighter = best and (load[tenant] or 0) - (load[best.tenant] or 0)
    if row and (not best or lighter < 0 or (lighter == 0 and tonumber(row.score) < tonumber(best.score))) then
      best = row
    end
  end
  if not best then break end
  lines[best.tenant].head = lines[best.tenant].head + 1
  take(best)
end
return claimed
