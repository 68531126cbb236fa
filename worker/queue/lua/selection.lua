-- Select the jobs to claim, in this order: all past their deadline, a suspect, and then the tenants' jobs in turn.
-- Selecting changes the index and no job.
--
-- The state of a selection: `index`; `now`; `lease_ms`; `takeover`: true if jobs whose lease expired may be selected;
-- `want`: the number of rows that are still free, or this worker's share of the jobs; `rows`: the rows of each line on
-- this worker, by the line's name.

local MAX_COUNTS_OF_TENANT = 4 -- at once, so that one tenant's long prompts leave others the rest

-- Return the state of a job if it waits. Otherwise correct its place in the index and return nil.
local function waiting_job(selection, id)
  local index = selection.index
  local score = redis.call('ZSCORE', index.queue, id)
  local job = score and read_job(id, score)
  if not job or FINAL[job.state] then
    index_job(index, id)
    return nil
  end
  local left_ms = lease_left(id, selection.lease_ms)
  if not left_ms then return job end
  move_to_leases(index, id, score, left_ms, selection.now)
end

local function may_take(selection, job)
  return selection.takeover or not job.lease_expired
end

local function count_row(selection, line)
  selection.rows[line] = (selection.rows[line] or 0) + 1
  selection.want = selection.want - 1
end

-- Check the leases that are due for a check, at most PAGE. Jobs without a lease wait again.
local function check_leases(selection)
  local index = selection.index
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', index.leases, '-inf', selection.now, 'LIMIT', 0, PAGE)) do
    local job = waiting_job(selection, id)
    if job and may_take(selection, job) then
      remove_from_index(index, id)
      add_to_index(index, job)
    end
  end
end

-- Return the jobs whose deadline has passed, at most PAGE. They take no row: they only have to end.
local function jobs_past_deadline(selection)
  local index, jobs = selection.index, {}
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', index.deadlines, '-inf', selection.now, 'LIMIT', 0, PAGE)) do
    local job = waiting_job(selection, id)
    if job and may_take(selection, job) then
      delete_deadline(index, id)
      if is_past_deadline(job, selection.now) then jobs[#jobs + 1] = job end
    end
  end
  return jobs
end

-- Remove the first count of a line, and return its job; nil if there is none that is due. Entries of jobs that do not
-- wait in a line are removed on the way, at most PAGE.
local function pop_count(selection, line)
  local index, counts = selection.index, selection.index.counts
  for _ = 1, PAGE do
    local first = first_of(counts, line)
    local since, id = split_member(line, first or '')
    if not first or (tonumber(since) or 0) > selection.now then return nil end
    remove_from_line(counts, line, first)
    local job = tonumber(since) and waiting_job(selection, id)
    if job and job.expirations == 0 then return job end
    if job then index_job(index, id) end
  end
end

-- Return waiting token counts, those of the tenant with the oldest one first: at most `want`, and as many of a tenant as
-- it may have at once. Others wait, here or in their tenants' lines. `tenants`: that of each count that runs on this
-- worker.
local function counts_in_turn(selection, want, tenants)
  local counts, jobs, taken = selection.index.counts, {}, {}
  if want < 1 then return jobs end
  for _, tenant in ipairs(tenants) do taken[line_of(tenant)] = (taken[line_of(tenant)] or 0) + 1 end
  -- At most `#tenants` of the lines belong to tenants that may have no more.
  local due = '(h' .. stamp(selection.now + 1)
  for _, head in ipairs(redis.call('ZRANGEBYLEX', counts, '[h', due, 'LIMIT', 0, want + #tenants)) do
    local line = string.sub(head, 17)
    if not first_of(counts, line) then redis.call('ZREM', counts, head) end -- a line that was lost
    while #jobs < want and (taken[line] or 0) < MAX_COUNTS_OF_TENANT do
      local job = pop_count(selection, line)
      if not job then break end
      taken[line] = (taken[line] or 0) + 1
      jobs[#jobs + 1] = job
    end
  end
  return jobs
end

-- Iterate over suspects until one takes a row, of those with the fewest crashes: if workers die repeatedly for another
-- reason, no suspect is tried twice while others wait. Each must be claimed before the next.
local function suspects(selection)
  local tries, done = PAGE, false
  return function()
    while tries > 0 and not done do
      tries = tries - 1
      local id = redis.call('ZRANGE', selection.index.suspects, 0, 0)[1]
      local job = id and waiting_job(selection, id)
      local taken = job and may_take(selection, job)
      if taken and is_past_deadline(job, selection.now) then return job end
      done = job or not id
      if taken then
        count_row(selection, line_of(job.tenant))
        return job
      end
    end
  end
end

-- Return lines by the age of their oldest job. `want` lines without a row on this worker are enough.
local function lines_by_age(selection)
  local count, lines, index = selection.want, {}, selection.index
  for _ in pairs(selection.rows) do count = count + 1 end
  local heads = redis.call('ZRANGEBYLEX', index.lines, '[h', '(h' .. stamp(selection.now + 1), 'LIMIT', 0, count)
  for _, head in ipairs(heads) do
    local since = tonumber(string.sub(head, 2, 16))
    if since then
      lines[#lines + 1] = { name = string.sub(head, 17), since = since }
    else
      redis.call('ZREM', index.lines, head) -- not one of ours
    end
  end
  return lines
end

-- Return the position of the next line: of those with the fewest rows, the one whose oldest job has waited longest.
local function next_line(rows, lines)
  local best = 1
  for at, line in ipairs(lines) do
    local difference = (rows[line.name] or 0) - (rows[lines[best].name] or 0)
    if difference < 0 or (difference == 0 and line.since < lines[best].since) then best = at end
  end
  return best
end

-- Return the line of which the first job was queued first in this span of time, as a member of `lines`; nil if there is
-- none.
local function head_between(selection, from, to)
  local least, most = '[h' .. stamp(from), '(h' .. stamp(to + 1)
  return redis.call('ZRANGEBYLEX', selection.index.lines, least, most, 'LIMIT', 0, 1)[1]
end

-- Return the milliseconds until the next job is due whose score is in the future: its producer deferred it, has a clock
-- that is ahead, or rounds to milliseconds, as arq does. 0 if there is none.
local function next_due_ms(selection)
  local head = head_between(selection, selection.now + 1, math.huge)
  local since = head and tonumber(string.sub(head, 2, 16))
  return since and since - selection.now or 0
end

-- Return the number of jobs in lines that are due. Some may have left the queue.
local function num_waiting(selection)
  local later = '(' .. string.format('%.0f', selection.now)
  return redis.call('ZLEXCOUNT', selection.index.lines, '[w', '(x')
    - redis.call('ZCOUNT', selection.index.jobs, later, '+inf')
end

-- Return when the first job of a line was queued, and its member of `lines`; nil if none is due.
local function first_due(selection, line)
  local first = first_of(selection.index.lines, line)
  if not first then return nil end
  local since = tonumber((split_member(line, first)))
  if not since then
    redis.call('ZREM', selection.index.lines, first) -- not one of ours
    return first_due(selection, line)
  end
  if since <= selection.now then return since, first end
end

-- Remove the first job of a line. Returns the job if it still waits there.
local function pop_first(selection, line, first)
  local index, first_stamp, id = selection.index, split_member(line, first)
  remove_from_line(index.lines, line, first)
  local job = redis.call('ZSCORE', index.jobs, id) and waiting_job(selection, id)
  if not job then return nil end
  if stamp(job.score) ~= first_stamp or job.expirations > 0 then
    index_job(index, id)
    return nil
  end
  return job
end

-- Iterate over the tenants' jobs until all rows are taken. It begins with the tenant that has the fewest rows here; of
-- one tenant the oldest job comes first. Each must be claimed before the next.
local function jobs_in_turn(selection)
  local lines, tries = lines_by_age(selection), PAGE
  return function()
    while selection.want > 0 and tries > 0 and #lines > 0 do
      local at = next_line(selection.rows, lines)
      local line = lines[at]
      local since, first = first_due(selection, line.name)
      if not since then
        redis.call('ZREM', selection.index.lines, 'h' .. stamp(line.since) .. line.name)
        table.remove(lines, at)
      elseif since > line.since then
        line.since = since
      else
        local job = pop_first(selection, line.name, first)
        if job and not is_past_deadline(job, selection.now) then
          count_row(selection, line.name)
        else -- the job takes no row, so another line may be the older one
          lines, tries = lines_by_age(selection), tries - 1
        end
        if job then return job end
      end
    end
  end
end
