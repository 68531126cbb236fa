-- End a job that no worker has, as a worker would.

-- Return the queue in which the job waits: the one that its state names, or one of `queues`; nil if in none of them.
local function queue_of_job(id, queues, model, lane)
  local all = { unpack(queues) }
  if model and lane then all[#all + 1] = 'sluice:queue:' .. model .. ':' .. lane end
  for _, queue in ipairs(all) do
    if type(redis.pcall('ZSCORE', queue, id)) == 'string' then return queue end
  end
end

local function has_lease(id)
  return type(redis.pcall('GET', 'arq:in-progress:' .. id)) == 'string'
end

-- A higher attempt number fences all earlier attempts.
local function next_attempt(job)
  local attempt = redis.pcall('HINCRBY', job, 'attempt', 1)
  if type(attempt) == 'number' then return attempt end
  redis.call('DEL', job) -- a foreign value
  return redis.call('HINCRBY', job, 'attempt', 1)
end

-- End a job of this queue that has no lease. `content`: the fields of the final event of this state, as JSON. `lives`:
-- the ms for which its log and its result are kept, by name, and those of a job that has not ended.
local function end_without_worker(id, queue, state, content, lives)
  local job, log = 'sluice:job:' .. id, 'sluice:log:' .. id
  remove_from_queue(queue, id) -- first: a full server refuses no write that follows one which frees memory
  redis.call('DEL', 'sluice:cancel:' .. id, 'arq:job:' .. id, 'arq:in-progress:' .. id, 'arq:retry:' .. id)
  local seq, now, attempt = redis.pcall('LLEN', log), milliseconds() / 1000, next_attempt(job)
  if type(seq) ~= 'number' then
    redis.call('DEL', log)
    seq = 0
  end
  local event = string.format(
    '{"id":%s,"seq":%d,"attempt":%d,"type":"%s","ts":%.3f,%s,' ..
    '"usage":{"prompt_tokens":0,"completion_tokens":0,"cached_tokens":0}}', cjson.encode(id), seq, attempt, state, now,
    content)
  append(log, 'sluice:ch:' .. id, seq, { event }, lives.job)
  redis.call('HSET', job, 'state', state, 'finished_at', now)
  redis.call('SET', 'sluice:result:' .. id, event, 'PX', lives.result)
  redis.call('PEXPIRE', job, lives.result)
  redis.call('PEXPIRE', log, lives.log)
  notify_job(id, state, event, redis.call('HMGET', job, unpack(NOTIFY_FIELDS)))
end
