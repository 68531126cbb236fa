-- Make a delivery to each endpoint that wants an event of the outboxes, and take deliveries that are due under a lease.
-- ARGV  now_ms ('': the server's time), lease_ms, the deliveries of an endpoint that may be under way here at once, and
--       for each endpoint that has some: its id, their number
-- Returns now_ms, 1 if outboxes hold more events (else 0), and for each delivery: its endpoint and itself, as JSON, and
-- its lease.
local MAX_WAITING = 10000 -- deliveries of an endpoint, about 5 MB; more are dropped, and counted
local MAX_MADE = 200      -- in one call: about 2 ms
local KINDS = { 'batch', 'response', 'job' }

local now, lease_ms, limit = tonumber(ARGV[1]) or milliseconds(), tonumber(ARGV[2]), tonumber(ARGV[3])
local under_way, endpoints, made, reply = {}, {}, 0, { '', 0 }
for at = 4, #ARGV, 2 do under_way[ARGV[at]] = tonumber(ARGV[at + 1]) end

local function number(value)
  return string.format('%.0f', value)
end

local function key_of(part, id)
  return 'sluice:webhooks:' .. part .. ':' .. id
end

local function wants(endpoint, event)
  if endpoint.disabled or endpoint.tenant and endpoint.tenant ~= event.tenant then return false end
  for _, name in ipairs(endpoint.events) do
    if name == event.type then return true end
  end
  return false
end

local function deliver(id, event)
  if redis.call('ZSCORE', key_of('due', id), event.id) then return end -- told before
  if redis.call('ZCARD', key_of('due', id)) >= MAX_WAITING then
    redis.call('HINCRBY', key_of('counts', id), 'dropped', 1)
    return
  end
  local delivery = { id = event.id, type = event.type, body = event.body, attempts = 0, since_ms = now }
  redis.call('ZADD', key_of('due', id), number(now), event.id)
  redis.call('ZADD', key_of('since', id), number(now), event.id)
  redis.call('HSET', key_of('waiting', id), event.id, cjson.encode(delivery))
  made = made + 1
end

local function empty(outbox)
  local events, done = redis.pcall('LRANGE', outbox, 0, 99), 0
  if events.err then return redis.call('DEL', outbox) end -- a foreign value
  for _, text in ipairs(events) do
    if made >= MAX_MADE then break end
    local readable, event = pcall(cjson.decode, text)
    for _, each in ipairs(readable and type(event) == 'table' and event.id and endpoints or {}) do
      if wants(each.endpoint, event) then deliver(each.id, event) end
    end
    done = done + 1
  end
  if done > 0 then redis.call('LTRIM', outbox, done, -1) end
  if redis.call('EXISTS', outbox) == 1 then reply[2] = 1 end
end

local function take(each)
  local free, due = limit - (under_way[each.id] or 0), key_of('due', each.id)
  if free <= 0 or tonumber(redis.call('HGET', key_of('counts', each.id), 'paused_until_ms') or 0) > now then return end
  for _, event in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', number(now), 'LIMIT', 0, free)) do
    local delivery, lease = redis.call('HGET', key_of('waiting', each.id), event), number(now + lease_ms)
    if delivery then
      redis.call('ZADD', due, lease, event)
      for _, part in ipairs({ each.text, delivery, lease }) do reply[#reply + 1] = part end
    else
      redis.call('ZREM', due, event)
    end
  end
end

local stored = redis.call('HGETALL', 'sluice:webhooks')
for at = 1, #stored, 2 do
  local readable, endpoint = pcall(cjson.decode, stored[at + 1])
  if readable and type(endpoint) == 'table' and type(endpoint.events) == 'table' then -- no foreign value
    endpoints[#endpoints + 1] = { id = stored[at], text = stored[at + 1], endpoint = endpoint }
  end
end
for _, kind in ipairs(KINDS) do empty('sluice:webhooks:outbox:' .. kind) end
for _, each in ipairs(endpoints) do take(each) end
reply[1] = number(now)
return reply
