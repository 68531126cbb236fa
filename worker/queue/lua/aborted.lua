-- Find the jobs that arq's `Job.abort` asks to end, among its newest requests.
-- KEYS  queues
-- Returns the ids that are in one of the queues. A request whose job does not exist, or was queued after it, is removed:
-- it would end a later job with that id. Requests for jobs of other queues are left to their workers.
local MAX_REQUESTS = 500 -- in one call: about 1 ms
local requests = redis.pcall('ZRANGE', ABORT, -MAX_REQUESTS, -1, 'WITHSCORES')
local found = {}
if requests.err then return found end -- a foreign value
for i = 1, #requests, 2 do
  local id, requested_at, queued_at = requests[i], tonumber(requests[i + 1]), nil
  for _, queue in ipairs(KEYS) do
    local score = redis.pcall('ZSCORE', queue, id)
    if type(score) == 'string' then queued_at = tonumber(score) end
  end
  if queued_at and queued_at <= requested_at then
    found[#found + 1] = id
  elseif queued_at or redis.call('EXISTS', 'arq:job:' .. id) == 0 then
    redis.call('ZREM', ABORT, id)
  end
end
return found
