-- End a job: append its last events, store its result and state, and delete arq's keys.
-- KEYS  job, log, channel, result, queue, and the keys to delete
-- ARGV  life_ms, attempt, seq, state, result, log_ttl_ms, result_ttl_ms, dead letter or '', events ...
-- Returns 'done', 'fenced', or the length of a list that has lost events.
local DEAD, MOST_DEAD = 'sluice:dead', 1000
local job, log, channel, result, queue = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local life_ms, attempt, seq, state = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

if not owns(job, attempt) then
  -- If this call is repeated because its reply was lost, our final event is the last one.
  return redis.call('LINDEX', log, -1) == ARGV[#ARGV] and 'done' or 'fenced'
end
local events = {}
for i = 9, #ARGV do events[#events + 1] = ARGV[i] end
local verdict = append(log, channel, seq, events, life_ms)
if verdict then return verdict == 'conflict' and 'fenced' or verdict end

local function store_dead_letter(id, letter)
  local letters = redis.pcall('HLEN', DEAD)
  if type(letters) ~= 'number' then redis.call('DEL', DEAD) -- not a hash: a foreign value
  elseif letters >= MOST_DEAD then
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
if ARGV[8] ~= '' then store_dead_letter(id, ARGV[8]) end
redis.call('HSET', job, 'state', state, 'finished_at', milliseconds() / 1000)
redis.call('SET', result, ARGV[5], 'PX', ARGV[7])
redis.call('PEXPIRE', job, ARGV[7])
redis.call('PEXPIRE', log, ARGV[6])
remove_from_queue(queue, id)
for i = 6, #KEYS do redis.call('DEL', KEYS[i]) end
return 'done'
