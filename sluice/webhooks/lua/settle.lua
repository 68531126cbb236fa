-- Note the outcome of a delivery's attempt.
-- ARGV  the endpoint's id, the event's id, the lease, the outcome (delivered, failed or dead), the delivery as JSON ('' if
--       it was delivered), the time of the next attempt and the time until which the endpoint gets none (0: no matter),
--       in Unix ms, a few words about the outcome
-- Returns 1, or 0 if the delivery has gone, or another deliverer has it, whose outcome counts unless this one succeeded.
local MAX_DEAD = 1000 -- of an endpoint, about 500 kB; the oldest are deleted
local id, event, outcome = ARGV[1], ARGV[2], ARGV[4]
local function key_of(part)
  return 'sluice:webhooks:' .. part .. ':' .. id
end

local lease = redis.call('ZSCORE', key_of('due'), event)
if not lease or lease ~= ARGV[3] and outcome ~= 'delivered' then return 0 end
if outcome == 'failed' then
  redis.call('ZADD', key_of('due'), ARGV[6], event)
  redis.call('HSET', key_of('waiting'), event, ARGV[5])
else
  redis.call('ZREM', key_of('due'), event)
  redis.call('ZREM', key_of('since'), event)
  redis.call('HDEL', key_of('waiting'), event)
end
if outcome == 'dead' then
  redis.call('RPUSH', key_of('dead'), ARGV[5])
  redis.call('LTRIM', key_of('dead'), -MAX_DEAD, -1)
end
redis.call('HINCRBY', key_of('counts'), outcome, 1)
redis.call('HSET', key_of('counts'), 'last', ARGV[8])
if ARGV[7] ~= '0' then redis.call('HSET', key_of('counts'), 'paused_until_ms', ARGV[7]) end
return 1
