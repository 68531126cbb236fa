-- Ask one process of a worker to drain or to restart: a field of its hash, which it reads when it publishes the others.
-- KEYS  the worker's hash
-- ARGV  its name, its started_at, "drain" or "restart"
-- Returns 1, or 0 if that process has ended.
local started_at = redis.pcall('HGET', KEYS[1], 'started_at')
if started_at ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'asked', ARGV[3] .. ' ' .. started_at)
redis.call('PUBLISH', 'sluice:control', 'worker ' .. ARGV[1])
return 1
