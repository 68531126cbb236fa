-- Cancel a job: a waiting job ends at once; for a running job, its worker is asked to end it.
-- KEYS  queues in which it may wait, in addition to the one that its state names
-- ARGV  id, life_ms, log_ttl_ms, result_ttl_ms, the ms for which a request to cancel a running job is stored ('': no
--       request is made), an id of this cancellation ('': none)
-- Returns 'cancelled', also if the call is repeated with its id because the reply was lost; 'ended' if the job had
-- ended before; 'requested'; or 'lost': as 'requested', but the job has a body and is in none of the queues. The last
-- two are followed by the error if the request could not be stored.
local id = ARGV[1]
local job, log, result = 'sluice:job:' .. id, 'sluice:log:' .. id, 'sluice:result:' .. id
local cancel_key, body, lease = 'sluice:cancel:' .. id, 'arq:job:' .. id, 'arq:in-progress:' .. id

local fields = redis.pcall('HMGET', job, 'state', 'model', 'lane', 'cancellation')
if fields.err then fields = {} end
if FINAL[fields[1]] then
  redis.call('DEL', cancel_key)
  return { ARGV[6] ~= '' and fields[4] == ARGV[6] and 'cancelled' or 'ended' }
end

local function queue_of_job()
  local queues = { unpack(KEYS) }
  if fields[2] and fields[3] then queues[#queues + 1] = 'sluice:queue:' .. fields[2] .. ':' .. fields[3] end
  for _, queue in ipairs(queues) do
    if type(redis.pcall('ZSCORE', queue, id)) == 'string' then return queue end
  end
end

-- A higher attempt number fences all earlier attempts.
local function next_attempt()
  local attempt = redis.pcall('HINCRBY', job, 'attempt', 1)
  if type(attempt) == 'number' then return attempt end
  redis.call('DEL', job) -- a foreign value
  return redis.call('HINCRBY', job, 'attempt', 1)
end

local function end_waiting(queue)
  remove_from_queue(queue, id) -- first: a full server refuses no write that follows one which frees memory
  redis.call('DEL', cancel_key, body, lease, 'arq:retry:' .. id)
  local seq, now, attempt = redis.pcall('LLEN', log), milliseconds() / 1000, next_attempt()
  if type(seq) ~= 'number' then
    redis.call('DEL', log)
    seq = 0
  end
  local event = string.format(
    '{"id":%s,"seq":%d,"attempt":%d,"type":"cancelled","ts":%.3f,"reason":"requested",' ..
    '"usage":{"prompt_tokens":0,"completion_tokens":0,"cached_tokens":0}}', cjson.encode(id), seq, attempt, now)
  append(log, 'sluice:ch:' .. id, seq, { event }, ARGV[2])
  redis.call('HSET', job, 'state', 'cancelled', 'finished_at', now)
  if ARGV[6] ~= '' then redis.call('HSET', job, 'cancellation', ARGV[6]) end
  redis.call('SET', result, event, 'PX', ARGV[4])
  redis.call('PEXPIRE', job, ARGV[4])
  redis.call('PEXPIRE', log, ARGV[3])
end

local queue = queue_of_job()
if queue and type(redis.pcall('GET', lease)) ~= 'string' then
  end_waiting(queue)
  return { 'cancelled' }
end
if ARGV[5] == '' then return { 'requested' } end

-- In this order: a worker that misses the message finds the key when it claims the job.
local stored = redis.pcall('SET', cancel_key, '1', 'PX', ARGV[5])
redis.call('PUBLISH', 'sluice:control', id)
local lost = not queue and fields[1] ~= 'running' and redis.call('EXISTS', body) == 1
return { lost and 'lost' or 'requested', stored.err and stored or nil }
