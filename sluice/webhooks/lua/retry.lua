-- Let a dead letter be delivered again.
-- ARGV  the endpoint's id, the event's id, the dead letter as it is stored, the new delivery as JSON, now_ms
-- Returns 1, or 0 if it has gone.
local id, event = ARGV[1], ARGV[2]
local function key_of(part)
  return 'sluice:webhooks:' .. part .. ':' .. id
end

if redis.call('LREM', key_of('dead'), 1, ARGV[3]) == 0 then return 0 end
redis.call('ZADD', key_of('due'), ARGV[5], event)
redis.call('ZADD', key_of('since'), ARGV[5], event)
redis.call('HSET', key_of('waiting'), event, ARGV[4])
return 1
