-- Delete the content of a job that has ended: its events, its result and its dead letter. Its state stays, so the id is not
-- run again.
-- KEYS  job, log, result, dead letters
-- ARGV  id
-- Returns 1, or 0 if the job has not ended.
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'queued' or state == 'running' then return 0 end
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HDEL', KEYS[4], ARGV[1])
return 1
