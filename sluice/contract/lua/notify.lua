-- Tell webhooks of an end, in the script that records it: an event in the outbox of its kind, from which deliverers take it.
local MAX_EVENTS = 10000 -- that wait in an outbox, about 3 MB; more are dropped, and counted

-- `kind`: job, response or batch; `key`: what makes the event's id, so that an end which is noted twice has one.
local function notify(kind, outcome, id, tenant, key)
  if type(redis.pcall('HGET', 'sluice:webhooks:wanted', kind)) ~= 'string' then return end -- no endpoint, or no right to it
  if #id > 128 then return end -- a foreign job, which only ends
  local outbox, type_of_event = 'sluice:webhooks:outbox:' .. kind, kind .. '.' .. outcome
  local waiting = redis.pcall('LLEN', outbox)
  if type(waiting) ~= 'number' then
    redis.call('DEL', outbox) -- a foreign value
    waiting = 0
  end
  if waiting >= MAX_EVENTS then
    redis.pcall('HINCRBY', 'sluice:webhooks:dropped', kind, 1)
    return
  end
  local event = 'evt_' .. string.sub(redis.sha1hex(type_of_event .. ' ' .. id .. ' ' .. key), 1, 32)
  local body = string.format('{"id":"%s","object":"event","created_at":%.0f,"type":"%s","data":{"id":%s}}', event,
    math.floor(milliseconds() / 1000), type_of_event, cjson.encode(id))
  redis.call('RPUSH', outbox, cjson.encode({ id = event, type = type_of_event, tenant = tenant or '', body = body }))
end

-- Tell of the end of a job. `final`: its final event, as JSON; `fields`: of the job's hash, those of `NOTIFY_FIELDS`.
local NOTIFY_FIELDS = { 'webhooks', 'function', 'tenant' }
local function notify_job(id, state, final, fields)
  local kind = fields[1] or 'job' -- 'none' for a line of a run, and for what a client of the gateway waits for
  if kind ~= 'job' and kind ~= 'response' or fields[2] == 'count' then return end
  local outcome = state
  if kind == 'response' and state == 'finished' then
    outcome = cjson.decode(final).finish_reason == 'length' and 'incomplete' or 'completed'
  end
  notify(kind, outcome, id, fields[3], final)
end
