-- Read and write what the workers of a model say to each other's claims: see sluice/contract/lua/fleet.lua.
--
-- The state of this worker's affinity: that of `read_fleet`; `me`; `said`, the numbers of its record; `ready`, the
-- time until it is done with what it has; `model`; `lease_ms`; `per_tenant`; `unmarked`, the number of jobs whose marks
-- may still be computed in this claim; `leaves`: false in the batch lane, whose free rows the records do not tell; `jobs` by id, with their marks.

local MAX_MARKED_BYTES = 1048576 -- of a body that is read for its marks: 0.2 ms to copy
local MARK_LIFE_MS = 1200000     -- prefix caches of busy workers hold little for longer
local MAX_HOLDERS = 64           -- in the value of a mark
local MAX_BEFORE = 56            -- bytes of names before that of a worker that takes a job: eight names

-- Write a hint. A foreign value at its key is deleted, and a full server may refuse it.
local function write_hint(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' and reply.err and string.find(reply.err, 'WRONGTYPE', 1, true) then
    delete_foreign(key, 'another type')
  end
end

-- Return the affinity of this worker; nil if it says nothing. `arguments`: wid, record, ready_ms and per_tenant.
local function affinity_of(queue, arguments, now)
  local from = string.match(arguments.record, '^%S+ %S+ ()')
  local at = tonumber(string.match(arguments.record, '^%S+ (%S+) ') or '')
  if arguments.wid == '' or not from or not at then return nil end
  local lease_ms = tonumber(arguments.lease_ms)
  local record = string.format('%.0f %.0f ', now + lease_ms, now) .. string.sub(arguments.record, from)
  local me = read_worker(arguments.wid, record, now)
  if not me then return nil end
  local affinity = read_fleet(model_of(queue), now, me)
  local ready = math.min(math.max(tonumber(arguments.ready_ms) - at, 0), 1e12) -- its clock may not be the server's
  affinity.me, affinity.model, affinity.ready, affinity.lease_ms = me, model_of(queue), ready, lease_ms
  affinity.per_tenant, affinity.unmarked, affinity.jobs, affinity.given = arguments.per_tenant == '1', 4, {}, 0
  affinity.leaves, affinity.said = arguments.lane ~= 'batch', {}
  for word in string.gmatch(record, '%S+') do affinity.said[#affinity.said + 1] = word end
  return affinity
end

-- Return a body with its files cut, as `_without_files` in sluice/submission.py.
local function without_files(body)
  local parts, at = {}, 1
  for _ = 1, 500 do
    local first = string.find(body, '"data:', at, true)
    local last = first and string.find(body, '"', first + 1, true)
    if not last then break end
    local is_file = string.find(string.sub(body, first, first + 127), ';base64,', 1, true)
    parts[#parts + 1] = string.sub(body, at, is_file and math.min(last - 1, first + 4095) or last - 1)
    at = last
  end
  parts[#parts + 1] = string.sub(body, at)
  return table.concat(parts)
end

-- Return the marks of a body from its first 256 KiB, as `marks_of` in sluice/submission.py, and the bytes that they are of.
local function marks_of(body)
  body = without_files(body)
  local first = string.find(string.sub(body, 1, 262144), '"messages":', 1, true) or 1
  local length, wanted, found, chain = math.min(#body, 262144) - first + 1, {}, {}, ''
  for rung = 0, 4 do
    local size = 1024 * 4 ^ rung
    local last = math.floor(length / size)
    for at = math.max(1, last - 5), last do wanted[at * size] = true end
  end
  for at = 1024, length, 1024 do
    chain = redis.sha1hex(chain .. string.sub(body, first + at - 1024, first + at - 1))
    if wanted[at] then found[#found + 1] = string.sub(chain, 1, 12) .. ' ' .. string.format('%d', at) end
  end
  return table.concat(found, ' '), #body - first + 1
end

-- Compute the marks of a job of a producer that gave none, and store them. Returns them, and the bytes; nil if too many
-- jobs of this claim have none, or the body is missing or too large.
local function mark_job(affinity, job)
  local size = affinity.unmarked > 0 and redis.pcall('STRLEN', 'arq:job:' .. job.id)
  if type(size) ~= 'number' or size == 0 or size > MAX_MARKED_BYTES then return nil end
  affinity.unmarked = affinity.unmarked - 1
  local marks, bytes = marks_of(redis.call('GET', 'arq:job:' .. job.id))
  write_hint('HSET', 'sluice:job:' .. job.id, 'marks', marks, 'bytes', bytes)
  redis.call('PEXPIRE', 'sluice:job:' .. job.id, PLAIN_JOB_LIFE_MS)
  return marks, string.format('%d', bytes)
end

-- Read the marks of a job, and who holds what of it. A token count has none: it computes nothing; nor has a plain
-- producer's job whose tenant is in its body alone, if prompts are cached per tenant.
local function read_prompt(affinity, job)
  if affinity.jobs[job.id] then return affinity.jobs[job.id] end
  affinity.jobs[job.id] = job
  local is_unmarked = job.is_count or (affinity.per_tenant and job.is_plain and job.tenant == '')
  local marks, bytes = job.marks, job.bytes
  if is_unmarked then marks, bytes = nil, nil elseif not marks then marks, bytes = mark_job(affinity, job) end
  read_marks(job, marks or '', bytes or '', not is_unmarked and job.prompt_cache_key)
  job.queued = tonumber(job.score)
  job.may_be_left = job.attempt == 0 and not job.is_count
  read_holders(job, affinity.model, affinity.per_tenant and job.tenant)
  return job
end

-- Note that this worker will hold the prompt of a job. Returns its marks, the bytes that they are of, and the tokens that
-- the worker holds already.
local function hold(affinity, job)
  if job.is_count then return '', 0, 0 end
  local me, marks = affinity.me, {}
  local held = held_by(job, me.wid)
  local own = compute_ms(me, held, job.size)
  if not job.is_counted then add_work(me, own) end
  affinity.given, affinity.ready = affinity.given + 1, affinity.ready + own
  local name = ' ' .. me.wid
  local first = name .. ' '
  for at, key in ipairs(job.keys) do
    local value, from, to = job.holders[at], nil, nil
    if value then from, to = string.find(value, first, 1, true) end
    if not value then
      write_hint('SET', key, first, 'PX', MARK_LIFE_MS)
    elseif not from or from > MAX_BEFORE then
      -- The newest first: claims read some names alone, and the oldest are of workers that have ended.
      if from then value = string.sub(value, 1, from - 1) .. string.sub(value, to) end
      value = #value > 7 * MAX_HOLDERS and string.match(value, '^(.* )%S+ $') or value
      write_hint('SET', key, name .. value, 'PX', MARK_LIFE_MS)
    elseif at == 1 or at == #job.names then
      redis.call('PEXPIRE', key, MARK_LIFE_MS)
    end
    marks[at] = job.names[at] .. ' ' .. job.ends[at]
  end
  return table.concat(marks, ' '), job.size, math.floor(held * me.per_byte)
end

-- Store what this worker says, with the jobs that it has been given.
local function store_affinity(affinity)
  local said, me, model = affinity.said, affinity.me, affinity.model
  local free = math.max(0, tonumber(said[3]) - affinity.given)
  if free == 0 and tonumber(said[3]) > 0 then affinity.ready = affinity.ready + me.gap end
  said[3] = string.format('%.0f', free)
  for at, left in ipairs(me.lefts) do said[8 + at] = string.format('%.0f', left) end
  write_hint('HSET', 'sluice:fleet:' .. model, me.wid, table.concat(said, ' '))
  local ready = affinity.now + affinity.ready + 150 * affinity.given -- a row in use counts as 150 ms
  write_hint('ZADD', 'sluice:ready:' .. model, string.format('%.0f', ready), me.wid)
  redis.call('PEXPIRE', 'sluice:fleet:' .. model, affinity.lease_ms)
  redis.call('PEXPIRE', 'sluice:ready:' .. model, affinity.lease_ms)
end

-- Wake the two workers with the least to do that have a free row, for jobs that wait beside this full one: submits may have
-- woken it alone for each of them. That follows a job that was taken, so wake-ups do not go on by themselves.
local function wake_others(affinity)
  for _, worker in ipairs(affinity.least) do
    if worker.free > worker.promised then redis.call('PUBLISH', 'sluice:wake:' .. affinity.model, worker.wid) end
  end
end

-- Take the jobs of a selection that this worker is done with soonest, and leave others to workers that are done sooner.
-- `is_kept`: as in a choice. Returns nil if nobody holds anything of the first jobs, or there is no other worker, so that
-- they can be taken in turn. Else: `again`, the milliseconds until a job that was left may be taken here, 0 if there is
-- none; `kept`, true if jobs are; the numbers of those left to a worker that holds more (`cache`) and to another (`load`),
-- and `scanned`; and `overruled`, the milliseconds that each job has waited whose time for a better worker is over.
local function choose_jobs(affinity, selection, is_kept, claim)
  if #affinity.least == 0 then return nil end
  local rows, woken = copy_rows(selection.rows), {}
  local found = { cache = 0, load = 0, overruled = {}, kept = false }
  local choice = {
    me = affinity.me, worker = affinity.worker, least = affinity.least, now = affinity.now, want = selection.want,
    is_kept = is_kept, leaves = affinity.leaves,
    in_turn = function(jobs) return ranked_turn(selection.rows, jobs) end,
  }
  local next_waiting = jobs_ahead(selection, rows, claim)
  function choice.next_job()
    local job = next_waiting()
    return job and read_prompt(affinity, job)
  end
  function choice.take(job, is_overruled)
    change_line(selection.index.lines, job.line, 'ZREM', job.member)
    take_row(selection, job)
    job.is_counted, job.is_off_line = true, job.is_indexed_alike
    if is_overruled then -- a score may be infinite
      found.overruled[#found.overruled + 1] = math.floor(math.min(1e12, affinity.now - job.queued))
    end
    claim(job)
  end
  function choice.leave(job, to)
    add_row(rows, job.line, -1)
    if job.is_left then return end
    local why = to.held > job.held and 'cache' or 'load'
    found[why] = found[why] + 1
    local key = 'sluice:job:' .. job.id
    write_hint('HSET', key, 'left_at', string.format('%.3f', affinity.now / 1000))
    if redis.call('PTTL', key) == -1 then redis.call('PEXPIRE', key, PLAIN_JOB_LIFE_MS) end -- this has created it
    if to.worker.free > to.worker.promised - 1 then woken[to.worker.wid] = true end
  end
  function choice.keep(job)
    add_row(rows, job.line, -1)
    found.kept = true
  end
  affinity.me.free = math.max(affinity.me.free, selection.want) -- offline rows that are in use can be preempted
  local again = choose(choice)
  if not again then return nil end
  -- Submits have woken one worker alone. Each job wakes one more, so that they do not wake each other forever.
  for wid in pairs(woken) do redis.call('PUBLISH', 'sluice:wake:' .. affinity.model, wid) end
  found.again, found.scanned = again < math.huge and again or 0, choice.scanned
  return found
end
