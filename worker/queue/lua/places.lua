-- Read the state of a job, and put it into the index of its queue.

-- Interval of lease checks of jobs that no worker with this index has claimed: their worker may release them without
-- changing it. Other leases are checked at their ends, so a claim does not cost more the more jobs run.
local RECHECK_MS = 500
local MAX_ID_BYTES = 8192
local MAX_READ_BYTES = 32768     -- of a body that is read for its user: about 0.1 ms
local bytes_to_read = 131072     -- in one call, so that a page of new jobs does not hold the server up
local MAX_NAME_BYTES = 512       -- 128 characters
local PLAIN_JOB_LIFE_MS = 86400000 -- arq's default for a queued body
local notes = {}       -- descriptions of deleted foreign values, for the worker's log

local function delete_foreign(key, kind)
  redis.call('DEL', key)
  notes[#notes + 1] = string.sub(key, 1, 200) .. ' held ' .. kind
end

-- Drop an id far longer than the contract's 128 characters: its keys, events and log lines would be as long.
local function drop_long_id(queue, id)
  redis.call('ZREM', queue, id)
  redis.call('UNLINK', 'arq:job:' .. id)
  notes[#notes + 1] = queue .. ' held an id of ' .. #id .. ' bytes, beginning with ' .. string.sub(id, 1, 100)
end

-- True for a number that HINCRBY accepts.
local function is_counter(text)
  return #text <= 15 and (text == '0' or string.match(text, '^[1-9]%d*$') ~= nil)
end

local function read_deadline(text)
  local seconds = tonumber(text or '')
  if seconds and seconds == seconds and math.abs(seconds) < 1e12 then return seconds * 1000 end
end

-- Return the state of a job of the queue that has no lease. If it is `running`, its lease has expired: its worker died. If the job was
-- on probation, the crash counts against it.
local function read_job(id, score)
  local key = 'sluice:job:' .. id
  local fields = redis.pcall('HMGET', key, 'state', 'lapses', 'probation', 'tenant', 'deadline', 'crashes', 'attempt',
    'function', 'user', 'model', 'indexed_attempt', 'marks', 'bytes', 'prompt_cache_key', 'left_at')
  for _, at in ipairs({ 2, 6, 7 }) do
    if fields.err or (fields[at] and not is_counter(fields[at])) then
      delete_foreign(key, fields.err and 'no hash' or 'a count that is no number')
      fields = {}
    end
  end
  local lease_expired = fields[1] == 'running'
  local counts_as_crash = lease_expired and fields[3] == '1'
  return {
    id = id, score = score, state = fields[1], lease_expired = lease_expired, counts_as_crash = counts_as_crash,
    tenant = fields[4] or '', user = fields[9] or '', is_indexed = fields[11] ~= nil and fields[11] == fields[7],
    is_plain = not fields[10], deadline = read_deadline(fields[5]),
    expirations = tonumber(fields[2] or 0) + (lease_expired and 1 or 0),
    crashes = tonumber(fields[6] or 0) + (counts_as_crash and 1 or 0), is_count = fields[8] == 'count',
    attempt = tonumber(fields[7] or 0), marks = fields[12], bytes = fields[13], prompt_cache_key = fields[14],
    is_left = fields[15]
  }
end

local function is_past_deadline(job, now)
  return job.deadline ~= nil and job.deadline < now
end

-- Return the remaining milliseconds of the job's lease, and its owner; nil without a lease. A lease without an expiry
-- is not ours, and gets one.
local function lease_left(id, lease_ms)
  local lease = 'arq:in-progress:' .. id
  local owner = redis.pcall('GET', lease)
  if not owner then return nil end
  if type(owner) ~= 'string' then
    delete_foreign(lease, 'no string')
    return nil
  end
  local left_ms = redis.call('PTTL', lease)
  if left_ms == -1 then redis.call('PEXPIRE', lease, lease_ms) end
  return left_ms == -1 and tonumber(lease_ms) or left_ms, owner
end

-- Move a job that was taken from its line, so that it has no other place than its deadline's, to the running jobs.
local function move_from_line(index, job, check_ms, now)
  if job.deadline then delete_deadline(index, job.id) end
  redis.call('ZADD', index.leases, now + check_ms, job.id)
end

-- Move a job to the running jobs; its lease is checked in `check_ms`.
local function move_to_leases(index, id, score, check_ms, now)
  remove_from_place(index, id)
  redis.call('ZADD', index.jobs, score, id)
  redis.call('ZADD', index.leases, now + check_ms, id)
end

local function is_name(value)
  return type(value) == 'string' and value ~= '' and #value <= MAX_NAME_BYTES
end

-- Store the user that the body of a plain producer's job names, if the body is short enough to be read here. The tenant
-- is never read from it: gateways trust that field.
local function store_user_of_body(job)
  local key = 'arq:job:' .. job.id
  local bytes = redis.pcall('STRLEN', key)
  if type(bytes) ~= 'number' or bytes == 0 or bytes > MAX_READ_BYTES then return end
  bytes_to_read = bytes_to_read - bytes
  local readable, body = pcall(cjson.decode, redis.call('GET', key))
  local request = readable and type(body) == 'table' and type(body.a) == 'table' and body.a[1]
  if type(request) ~= 'table' then return end
  local user = is_name(request.user) and request.user or request.safety_identifier
  if not is_name(user) then return end
  job.user = user
  redis.call('HSET', 'sluice:job:' .. job.id, 'user', user)
  redis.call('PEXPIRE', 'sluice:job:' .. job.id, PLAIN_JOB_LIFE_MS)
end

-- Add a waiting job: to the suspects, by its crashes, if its lease has ever expired; else to its user's line.
local function add_to_index(index, job)
  if job.is_plain and job.user == '' and bytes_to_read > 0 then store_user_of_body(job) end
  if job.expirations == 0 then
    add_waiting(index, job.id, job.score, line_of(job.tenant, job.user), job.deadline, job.is_count)
    return
  end
  local rank = math.min(job.crashes, 99) * 1e13 + math.min(tonumber(stamp(job.score)), 1e13 - 1)
  redis.call('ZADD', index.jobs, job.score, job.id)
  redis.call('ZADD', index.suspects, rank, job.id)
  if job.deadline then store_deadline(index, job.id, job.deadline) end
end

-- Add a job of the queue to the index, or correct its place.
local function index_job(index, id)
  remove_from_index(index, id)
  local score = redis.call('ZSCORE', index.queue, id)
  if not score then return end
  if #id > MAX_ID_BYTES then
    drop_long_id(index.queue, id)
    return
  end
  local job = read_job(id, score)
  if FINAL[job.state] then -- queued again after its end: it stays ended
    redis.call('ZREM', index.queue, id)
    redis.call('DEL', 'arq:job:' .. id)
  elseif job.lease_expired or redis.call('EXISTS', 'arq:in-progress:' .. id) == 1 then
    redis.call('ZADD', index.jobs, score, id)
    redis.call('ZADD', index.leases, 0, id) -- checked by the next claim
  else
    add_to_index(index, job)
  end
end
