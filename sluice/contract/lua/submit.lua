-- Queue one job and wake the workers, unless its id is in use, the lane is full, or no live worker serves the model
-- although one is required. The name of an alias stands for the model that it has now: see names.lua.
-- KEYS  body, queue, job, wake channel, workers of the model, and any number of strings to set if the job is queued
-- ARGV  id, body, life_ms, lane, tenant or '', deadline_s or '', prompt_cache_key or '', submission or '',
--       1 if a live worker is required (else 0), the function, user or '', the marks of the prompt or '', the
--       bytes that they are of, the webhooks of its end (see notify.lua; '': those of a job), the traceparent or '',
--       and for each of these strings its value and life_ms
-- Returns 1, 'queued', 1 if a worker serves the model (else 0), and the model that an alias stands for ('': no alias);
-- or 0, the state of the job with this id, and the same two; or -1, the lane's length, its limit, and the estimated
-- seconds until it has room ('' if no job ended lately); or -2 and that model without a live worker.
local body, queue, job, wake, workers = unpack(KEYS)
local id, lane, tenant, user = ARGV[1], ARGV[4], ARGV[5], ARGV[11]
local now_ms = milliseconds()

local limit, rate = read_workers(workers, now_ms)
local model, alias = string.sub(queue, #'sluice:queue:' + 1, -#lane - 2), nil
local target = not limit and model_of_alias(model) or ''
if target ~= '' then
  model, alias = target, model
  queue, wake, workers = 'sluice:queue:' .. model .. ':' .. lane, 'sluice:wake:' .. model, 'sluice:model:' .. model
  limit, rate = read_workers(workers, now_ms)
end
local served = limit and 1 or 0

local existing = redis.pcall('HMGET', job, 'state', 'submission')
if existing.err then
  redis.call('DEL', job) -- a foreign value
  existing = {}
end
if existing[1] then -- a submission that is repeated because its reply was lost counts as new again
  local is_repeated = ARGV[8] ~= '' and existing[2] == ARGV[8]
  return { is_repeated and 1 or 0, existing[1], served, target }
end
if redis.call('EXISTS', body) == 1 then return { 0, 'queued', served, target } end

if ARGV[9] == '1' and not limit then
  -- Changes nothing. A server that refuses writes raises its error here: its workers cannot show that they live.
  redis.call('ZADD', queue, 'XX', 0, '')
  return { -2, target }
end
local length = redis.call('ZCARD', queue)
if limit and length >= limit then
  return { -1, length, limit, rate > 0 and tostring((length - limit + 1) / rate) or '' }
end

redis.call('SET', body, ARGV[2], 'PX', ARGV[3])
for i = 6, #KEYS do redis.call('SET', KEYS[i], ARGV[2 * i + 4], 'PX', ARGV[2 * i + 5]) end
redis.call('ZADD', queue, now_ms, id)
redis.call('HSET', job, 'state', 'queued', 'model', model, 'lane', lane, 'queued_at', now_ms / 1000)
-- The server would write a number of 17 digits with an exponent.
local deadline = ARGV[6] ~= '' and string.format('%.3f', now_ms / 1000 + ARGV[6]) or nil
if alias then redis.call('HSET', job, 'alias', alias) end
if tenant ~= '' then redis.call('HSET', job, 'tenant', tenant) end
if user ~= '' then redis.call('HSET', job, 'user', user) end
if deadline then redis.call('HSET', job, 'deadline', deadline) end
if ARGV[7] ~= '' then redis.call('HSET', job, 'prompt_cache_key', ARGV[7]) end
if ARGV[8] ~= '' then redis.call('HSET', job, 'submission', ARGV[8]) end
if ARGV[14] ~= '' then redis.call('HSET', job, 'webhooks', ARGV[14]) end
if ARGV[15] ~= '' then redis.call('HSET', job, 'traceparent', ARGV[15]) end
local is_count = ARGV[10] == 'count'
if is_count then redis.call('HSET', job, 'function', 'count') end
redis.call('HSET', job, 'marks', ARGV[12], 'bytes', ARGV[13])
redis.call('PEXPIRE', job, ARGV[3])

local index = index_of(queue)
if redis.call('EXISTS', index.jobs) == 1 then -- otherwise the next claim creates it
  in_index(add_waiting, index, id, now_ms, line_of(tenant, user), deadline and tonumber(deadline) * 1000, is_count)
end

-- Return the wid of the worker with a free row that is done with this job soonest; '', which wakes all, if nobody is known
-- to hold anything of it, all who are known are full, or it is of the batch lane, whose free rows no record tells.
local function best_worker()
  local prompt, fleet, best, least = {}, read_fleet(model, now_ms), '', math.huge
  read_marks(prompt, ARGV[12], ARGV[13], ARGV[7] ~= '' and ARGV[7])
  if is_count or lane == 'batch' or #fleet.least == 0 or #prompt.names == 0 then return '' end
  read_holders(prompt, model)
  if tenant ~= '' then -- workers may keep a prefix cache per tenant
    local shared = prompt.holders
    read_holders(prompt, model, tenant)
    for at, others in ipairs(shared) do prompt.holders[at] = (others or '') .. (prompt.holders[at] or '') end
  end
  if not find_others(fleet, prompt, 0, '') then return '' end
  for _, other in ipairs(prompt.others) do
    local _, all = cost_ms(other.worker, other.own, now_ms)
    if other.worker.free > 0 and all < least then best, least = other.worker.wid, all end
  end
  return best
end
redis.call('PUBLISH', wake, best_worker())
return { 1, 'queued', served, target }
