-- End a job: append its last events, store its result and state, and delete arq's keys.
-- KEYS  job, log, channel, result, queue, and the keys to delete
-- ARGV  by name: life_ms, attempt, seq, state, result, log_ttl_ms, result_ttl_ms, dead_letter (or ''); lists: events,
--       and fields, the names and values to set in the job's hash
-- Returns 'done', 'fenced', or the length of a list that has lost events.
local DEAD, MAX_DEAD = 'sluice:dead', 1000
local job, log, channel, result, queue = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local arguments = read_arguments({ events = true, fields = true })
local events = arguments.events

if not owns(job, arguments.attempt) then
  -- If this call is repeated because its reply was lost, our final event is the last one.
  return redis.call('LINDEX', log, -1) == events[#events] and 'done' or 'fenced'
end
local verdict = append(log, channel, tonumber(arguments.seq), events, arguments.life_ms)
if verdict then return verdict == 'conflict' and 'fenced' or verdict end

local function store_dead_letter(id, letter)
  local letters = redis.pcall('HLEN', DEAD)
  if type(letters) ~= 'number' then redis.call('DEL', DEAD) -- not a hash: a foreign value
  elseif letters >= MAX_DEAD then
    local all, oldest, oldest_at = redis.call('HGETALL', DEAD), nil, math.huge
    for i = 1, #all, 2 do
      local readable, decoded = pcall(cjson.decode, all[i + 1])
      local at = readable and type(decoded) == 'table' and tonumber(decoded.parked_at) or 0
      if at < oldest_at then oldest, oldest_at = all[i], at end
    end
    redis.call('HDEL', DEAD, oldest)
  end
  redis.call('HSET', DEAD, id, letter)
end

local id = string.sub(job, #'sluice:job:' + 1)
if arguments.dead_letter ~= '' then store_dead_letter(id, arguments.dead_letter) end
redis.call('HSET', job, 'state', arguments.state, 'finished_at', milliseconds() / 1000, unpack(arguments.fields))
redis.call('SET', result, arguments.result, 'PX', arguments.result_ttl_ms)
redis.call('PEXPIRE', job, arguments.result_ttl_ms)
redis.call('PEXPIRE', log, arguments.log_ttl_ms)
remove_from_queue(queue, id)
local worker, kind = unpack(redis.call('HMGET', job, 'worker', 'function'))
if worker and kind ~= 'count' then count_ended(queue, worker) end
for i = 6, #KEYS do redis.call('DEL', KEYS[i]) end
notify_job(id, arguments.state, events[#events], redis.call('HMGET', job, unpack(NOTIFY_FIELDS)))
return 'done'
