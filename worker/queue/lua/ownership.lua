-- Own a job: a lease, and the next attempt number, which fences the writes of earlier owners.

local function body_of(id, most_bytes)
  local key = 'arq:job:' .. id
  local bytes = redis.pcall('STRLEN', key)
  if type(bytes) ~= 'number' then bytes = 0 end -- a foreign value: the job ends like one without a body
  return bytes > 0 and bytes <= most_bytes and redis.call('GET', key) or '', bytes
end

local function events_of(id)
  local key = 'sluice:log:' .. id
  local events = redis.pcall('LLEN', key)
  if type(events) == 'number' then return events end
  delete_foreign(key, 'no list')
  return 0
end

-- Give a waiting job to a worker. If its last owner died, it is on probation, and a crash on probation is counted.
-- Returns the members of `Claim` by their names.
local function take_ownership(index, job, arguments, now)
  local id, key = job.id, 'sluice:job:' .. job.id
  local expired = is_past_deadline(job, now)
  local lease_ms, attempt = tonumber(arguments.lease_ms), job.attempt + 1
  if job.is_off_line and not job.is_count then
    move_from_line(index, job, lease_ms, now)
  else
    move_to_leases(index, id, job.score, lease_ms, now)
  end
  if job.expirations > 0 then redis.call('HSET', key, 'lapses', job.expirations, 'probation', 1) end
  redis.call('SET', 'arq:in-progress:' .. id, arguments.worker .. ':' .. attempt, 'PX', arguments.lease_ms)
  redis.call('HSET', key, 'attempt', attempt, 'state', 'running', 'worker', arguments.worker, 'lane', arguments.lane,
    'started_at', now / 1000, 'crashes', job.crashes, 'indexed_attempt', attempt)
  redis.call('PEXPIRE', key, arguments.life_ms)
  local events = events_of(id)
  if events > 0 then redis.call('PEXPIRE', 'sluice:log:' .. id, arguments.life_ms) end
  -- No body for a job past its deadline, since thousands may expire together.
  local body, bytes = body_of(id, expired and 0 or tonumber(arguments.max_body_bytes))
  return { 'job_id', id, 'attempt', attempt, 'crashes', job.crashes, 'lease_expirations', job.expirations,
    'cancelled', redis.call('EXISTS', 'sluice:cancel:' .. id), 'expired', expired and 1 or 0,
    'is_count', job.is_count and 1 or 0, 'queued_ms', job.score, 'events', events, 'body', body, 'body_bytes', bytes,
    'tenant', job.tenant, 'user', job.user,
    'resume_state', redis.call('HMGET', key, unpack(arguments.resume_fields)) }
end

-- Requeue claims of this worker whose reply was lost: it has not started these jobs.
local function requeue_lost_claims(index, arguments)
  local worker, running = arguments.worker .. ':', {}
  for _, id in ipairs(arguments.running) do running[id] = true end
  for _, id in ipairs(redis.call('ZRANGE', index.leases, 0, -1)) do
    local _, owner = lease_left(id, arguments.lease_ms)
    if not running[id] and owner and string.sub(owner, 1, #worker) == worker then
      redis.pcall('HSET', 'sluice:job:' .. id, 'state', 'queued')
      redis.call('DEL', 'arq:in-progress:' .. id)
      redis.call('ZADD', index.leases, 0, id)
    end
  end
end
