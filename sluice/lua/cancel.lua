-- End a job that waits in one of our queues: `cancelled`, its result and its state in one go.
-- KEYS  job, log, channel, result, lease, the keys to delete ..., and as the last two our queues
-- ARGV  id, life_ms, log_ttl_ms, result_ttl_ms, number of keys to delete
-- Returns 1, or 0 where it does not wait here: unknown, running, or ended.
local job, log, channel, result, lease = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local id, queues = ARGV[1], { KEYS[#KEYS - 1], KEYS[#KEYS] }

local waits = redis.call('ZSCORE', queues[1], id) or redis.call('ZSCORE', queues[2], id)
if not waits or redis.call('EXISTS', lease) == 1 or FINAL[redis.call('HGET', job, 'state')] then return 0 end

local seq, now = redis.call('LLEN', log), milliseconds() / 1000
local attempt = redis.call('HINCRBY', job, 'attempt', 1) -- fences whoever ran it before
local event = string.format(
  '{"id":%s,"seq":%d,"attempt":%d,"type":"cancelled","ts":%.3f,"reason":"requested",' ..
  '"usage":{"prompt_tokens":0,"completion_tokens":0,"cached_tokens":0}}', cjson.encode(id), seq, attempt, now)
append(log, channel, seq, { event }, ARGV[2])
redis.call('HSET', job, 'state', 'cancelled', 'finished_at', now)
redis.call('SET', result, event, 'PX', ARGV[4])
redis.call('PEXPIRE', job, ARGV[4])
redis.call('PEXPIRE', log, ARGV[3])
leave_queue(queues[1], id)
leave_queue(queues[2], id)
for i = 6, 5 + tonumber(ARGV[5]) do redis.call('DEL', KEYS[i]) end
return 1
