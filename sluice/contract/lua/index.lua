-- The index of one queue: finds the next job without a walk over the queue.
--
-- The queue, arq's sorted set, is authoritative: an id that is not in it is no job. The index may be deleted at any
-- time; claim.lua compares the two and repairs the index. Each job of the queue is in `jobs` and in exactly one of
-- `lines`, `suspects` and `leases`.
--   jobs       ids by their score in the queue: a copy of the indexed part of the queue
--   lines      waiting jobs, in a line for each user of each tenant. All scores are 0, so members are in the order of
--              their bytes:
--              'w' tenant '\1' user '\0' stamp id   a job
--              'u' tenant '\0' stamp user           a user, by the stamp of its first job
--              'h' stamp tenant                     a tenant, by the stamp of its first job
--              'd'                                  `deadlines` has members: shows if that key was lost
--   suspects   jobs that were running when a worker died: those with the fewest crashes first, then the oldest
--   leases     running jobs, by the time of the next check of their lease
--   deadlines  jobs of `lines` and `suspects` that have a deadline, by deadline
--   counts     jobs of `lines` that are token counts, in lines of the same form, so that a tenant or a user with many
--              hides no other; one that is missing here waits for a row like a chat
--
-- The 2 in the keys is the version of the members above: versions of Sluice that differ in it share a queue, and each
-- keeps an index of its own.
--
-- Only claims renew the index: without them it expires, and a submit does not create a new one. So it cannot grow if
-- all workers are of a version without an index.
local INDEX_LIFE_MS = 60000

local function index_of(queue)
  local name = 'sluice:index:2:' .. string.sub(queue, #'sluice:queue:' + 1)
  return { queue = queue, jobs = name, lines = name .. ':lines', suspects = name .. ':suspects',
    leases = name .. ':leases', deadlines = name .. ':deadlines', counts = name .. ':count-lines' }
end

local function drop_index(index)
  redis.call('UNLINK', index.jobs, index.lines, index.suspects, index.leases, index.deadlines, index.counts)
end

-- Run one of the functions below. If it fails, for example by a foreign value at one of the keys, only the index is
-- lost.
local function in_index(change, index, ...)
  if not pcall(change, index, ...) then drop_index(index) end
end

-- Return a score as 15 digits, whose order as bytes is that of the numbers.
local function stamp(score)
  return string.format('%015.0f', math.min(math.max(tonumber(score), 0), 999999999999999))
end

local TENANTS = 'h' -- begins the members of all tenants

local function users_of(tenant)
  return 'u' .. tenant .. '\0'
end

-- Return the line of a user: the names, and what the members of its jobs begin with. Names whose first 128 bytes are
-- equal share one.
local function line_of(tenant, user)
  tenant = string.gsub(string.sub(tenant or '', 1, 128), '[%z\1]', ' ')
  user = string.gsub(string.sub(user or '', 1, 128), '[%z\1]', ' ')
  return { tenant = tenant, user = user, jobs = 'w' .. tenant .. '\1' .. user .. '\0' }
end

-- Return the first member that begins with `prefix` and a stamp; `lines` is the key of the lines: those of all jobs, or
-- those of token counts.
local function first_of(lines, prefix)
  return redis.call('ZRANGEBYLEX', lines, '[' .. prefix, '(' .. prefix .. ':', 'LIMIT', 0, 1)[1]
end

-- Return the stamp in a member that begins with `prefix`, and what follows: an id or a name.
local function split_member(prefix, member)
  local from = #prefix + 1
  return string.sub(member, from, from + 14), string.sub(member, from + 15)
end

local function first_stamp(lines, prefix)
  local first = first_of(lines, prefix)
  return first and (split_member(prefix, first))
end

local function move_member(lines, prefix, name, from, to)
  if from == to then return end
  if from then redis.call('ZREM', lines, prefix .. from .. name) end
  if to then redis.call('ZADD', lines, 0, prefix .. to .. name) end
end

-- Change the jobs of a line with a command on `lines`, and keep the members of its user and its tenant at the stamps of
-- their first jobs.
local function change_line(lines, line, command, ...)
  local from = first_stamp(lines, line.jobs)
  redis.call(command, lines, ...)
  local to = first_stamp(lines, line.jobs)
  if from == to then return end
  local users = users_of(line.tenant)
  local tenant_from = first_stamp(lines, users)
  move_member(lines, users, line.user, from, to)
  move_member(lines, TENANTS, line.tenant, tenant_from, first_stamp(lines, users))
end

local function enqueue(lines, line, score, id)
  change_line(lines, line, 'ZADD', 0, line.jobs .. stamp(score) .. id)
  redis.call('PEXPIRE', lines, INDEX_LIFE_MS)
end

-- Store a job's deadline, in Unix milliseconds. Raises an error if the deadlines of other jobs were lost.
local function store_deadline(index, id, deadline)
  local marked = redis.call('ZADD', index.lines, 0, 'd') == 0
  if marked and redis.call('EXISTS', index.deadlines) == 0 then error('the deadlines were lost') end
  redis.call('ZADD', index.deadlines, deadline, id)
  redis.call('PEXPIRE', index.lines, INDEX_LIFE_MS)
  redis.call('PEXPIRE', index.deadlines, INDEX_LIFE_MS)
end

local function delete_deadline(index, id)
  if redis.call('ZREM', index.deadlines, id) == 1 and redis.call('EXISTS', index.deadlines) == 0 then
    redis.call('ZREM', index.lines, 'd')
  end
end

-- Add a waiting job to its line. `deadline`: in Unix milliseconds, or nil.
local function add_waiting(index, id, score, line, deadline, is_count)
  redis.call('ZADD', index.jobs, score, id)
  enqueue(index.lines, line, score, id)
  if deadline then store_deadline(index, id, deadline) end
  if is_count then enqueue(index.counts, line, score, id) end
end

-- Remove a job from its place in `lines`, `suspects` or `leases`, and its deadline. Returns false if it has none.
local function remove_from_place(index, id)
  local score = redis.call('ZSCORE', index.jobs, id)
  if not score then return false end
  local names = redis.pcall('HMGET', 'sluice:job:' .. id, 'tenant', 'user')
  local line = names.err and line_of() or line_of(names[1] or '', names[2] or '')
  local member = line.jobs .. stamp(score) .. id
  change_line(index.lines, line, 'ZREM', member)
  if redis.call('ZSCORE', index.counts, member) then change_line(index.counts, line, 'ZREM', member) end
  redis.call('ZREM', index.suspects, id)
  redis.call('ZREM', index.leases, id)
  delete_deadline(index, id)
  return true
end

-- Remove a job from the index, for good or before it gets another place.
local function remove_from_index(index, id)
  if remove_from_place(index, id) then redis.call('ZREM', index.jobs, id) end
end

local ABORT = 'arq:abort' -- sorted set of arq's: ids of jobs to end, by the time of the request in Unix milliseconds

-- While a capture of its model runs, keep the body of a job that ends, and its id, for some seconds: see
-- sluice/capture/recorder.py.
local CAPTURED_MS = 10000
local function keep_for_captures(queue, id)
  local model, lane = string.match(queue, '^sluice:queue:([^:]+):(%a+)$')
  if not model or redis.call('EXISTS', 'sluice:capture:' .. model) == 0 then return end
  local ended, body, now = 'sluice:captured:' .. model, redis.pcall('GET', 'arq:job:' .. id), milliseconds()
  local queued = redis.pcall('ZSCORE', queue, id)
  -- An error, of a full server or for a foreign value, costs the capture the job, and the job nothing.
  if type(body) == 'string' then redis.pcall('SET', ended .. ':' .. id, body, 'PX', CAPTURED_MS) end
  redis.pcall('ZADD', ended, now, stamp(type(queued) == 'string' and queued or now) .. lane .. ':' .. id)
  redis.pcall('PEXPIRE', ended, CAPTURED_MS)
  local late = redis.pcall('ZRANGEBYSCORE', ended, '-inf', now - CAPTURED_MS, 'LIMIT', 0, 2) -- one more than was added
  for i = 1, #late do redis.pcall('ZREM', ended, late[i]) end
end

-- Remove a job that ends from the queue, its index, and the requests to abort it.
local function remove_from_queue(queue, id)
  keep_for_captures(queue, id)
  redis.call('ZREM', queue, id)
  redis.pcall('ZREM', ABORT, id) -- an error for a foreign value
  in_index(remove_from_index, index_of(queue), id)
end
