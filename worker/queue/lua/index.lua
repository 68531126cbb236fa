-- The index of one queue: finds the next job without a walk over the queue.
--
-- The queue, arq's sorted set, is authoritative: an id that is not in it is no job. The index may be deleted at any
-- time; claim.lua compares the two and repairs the index. Each job of the queue is in `jobs` and in exactly one of
-- `lines`, `suspects` and `leases`.
--   jobs       ids by their score in the queue: a copy of the indexed part of the queue
--   lines      waiting jobs, in a line for each tenant. All scores are 0, so members are in the order of their bytes:
--              'w' line '\0' stamp id   a job
--              'h' stamp line           a line, by the stamp of its first job
--              'd'                      `deadlines` has members: shows if that key was lost
--   suspects   jobs that were running when a worker died: those with the fewest crashes first, then the oldest
--   leases     running jobs, by the time of the next check of their lease
--   deadlines  jobs of `lines` and `suspects` that have a deadline, by deadline
--   counts     jobs of `lines` that are token counts, in lines of the same form, so that a tenant with many hides no
--              other; one that is missing here waits for a row like a chat
--
-- Only claims renew the index: without them it expires, and a submit does not create a new one. So it cannot grow if
-- all workers are of a version without an index.
local INDEX_LIFE_MS = 60000

local function index_of(queue)
  local name = 'sluice:index:' .. string.sub(queue, #'sluice:queue:' + 1)
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

-- Return the name of a tenant's line. Tenants whose first 128 bytes are equal share one.
local function line_of(tenant)
  return (string.gsub(string.sub(tenant or '', 1, 128), '%z', ' '))
end

-- Return the first job of a line; `lines` is the key of the lines: those of all jobs, or those of token counts.
local function first_of(lines, line)
  local name = 'w' .. line
  return redis.call('ZRANGEBYLEX', lines, '[' .. name .. '\0', '(' .. name .. '\1', 'LIMIT', 0, 1)[1]
end

-- Return the stamp and the id in a member of `lines` for a job.
local function split_member(line, member)
  local from = #line + 3
  return string.sub(member, from, from + 14), string.sub(member, from + 15)
end

local function enqueue(lines, line, score, id)
  local first, own_stamp = first_of(lines, line), stamp(score)
  redis.call('ZADD', lines, 0, 'w' .. line .. '\0' .. own_stamp .. id)
  local first_stamp = first and split_member(line, first)
  if not first or tonumber(own_stamp) < tonumber(first_stamp) then
    if first then redis.call('ZREM', lines, 'h' .. first_stamp .. line) end
    redis.call('ZADD', lines, 0, 'h' .. own_stamp .. line)
  end
  redis.call('PEXPIRE', lines, INDEX_LIFE_MS)
end

local function remove_from_line(lines, line, member)
  local first = first_of(lines, line)
  if redis.call('ZREM', lines, member) == 0 or first ~= member then return end
  redis.call('ZREM', lines, 'h' .. split_member(line, first) .. line)
  local next_first = first_of(lines, line)
  if next_first then redis.call('ZADD', lines, 0, 'h' .. split_member(line, next_first) .. line) end
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

-- Add a waiting job. `deadline`: in Unix milliseconds, or nil.
local function add_waiting(index, id, score, tenant, deadline, is_count)
  redis.call('ZADD', index.jobs, score, id)
  enqueue(index.lines, line_of(tenant), score, id)
  if deadline then store_deadline(index, id, deadline) end
  if is_count then enqueue(index.counts, line_of(tenant), score, id) end
end

-- Remove a job from its place in `lines`, `suspects` or `leases`, and its deadline. Returns false if it has none.
local function remove_from_place(index, id)
  local score = redis.call('ZSCORE', index.jobs, id)
  if not score then return false end
  local tenant = redis.pcall('HGET', 'sluice:job:' .. id, 'tenant')
  local line = line_of(type(tenant) == 'string' and tenant or '')
  local member = 'w' .. line .. '\0' .. stamp(score) .. id
  remove_from_line(index.lines, line, member)
  if redis.call('ZSCORE', index.counts, member) then remove_from_line(index.counts, line, member) end
  redis.call('ZREM', index.suspects, id)
  redis.call('ZREM', index.leases, id)
  delete_deadline(index, id)
  return true
end

-- Remove a job from the index, for good or before it gets another place.
local function remove_from_index(index, id)
  if remove_from_place(index, id) then redis.call('ZREM', index.jobs, id) end
end

-- Remove a job from the queue and its index.
local function remove_from_queue(queue, id)
  redis.call('ZREM', queue, id)
  in_index(remove_from_index, index_of(queue), id)
end
