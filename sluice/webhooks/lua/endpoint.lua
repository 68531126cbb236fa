-- Replace an endpoint unless another client has changed it, and note which kinds of events the endpoints want.
-- ARGV  id, the endpoint as it was ('': there was none), the new one ('': none, and what waits for it is deleted)
-- Returns 1; 0 if it was changed; -1 if there are too many.
local MAX_ENDPOINTS = 100
local id, old, new = ARGV[1], ARGV[2], ARGV[3]
if (redis.call('HGET', 'sluice:webhooks', id) or '') ~= old then return 0 end
if old == '' and redis.call('HLEN', 'sluice:webhooks') >= MAX_ENDPOINTS then return -1 end

if new ~= '' then
  redis.call('HSET', 'sluice:webhooks', id, new)
else
  redis.call('HDEL', 'sluice:webhooks', id)
  for _, part in ipairs({ 'due', 'since', 'waiting', 'dead', 'counts' }) do
    redis.call('DEL', 'sluice:webhooks:' .. part .. ':' .. id)
  end
end

redis.call('DEL', 'sluice:webhooks:wanted')
for _, text in ipairs(redis.call('HVALS', 'sluice:webhooks')) do
  local readable, endpoint = pcall(cjson.decode, text)
  if readable and type(endpoint) == 'table' and type(endpoint.events) == 'table' and not endpoint.disabled then
    for _, event in ipairs(endpoint.events) do
      redis.call('HSET', 'sluice:webhooks:wanted', string.match(event, '^%a+'), 1)
    end
  end
end
return 1
