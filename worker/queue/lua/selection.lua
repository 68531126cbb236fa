-- Select the jobs to claim, in this order: all past their deadline, a suspect, and then the jobs of tenants and
-- their users in turn.
-- Selecting changes the index and no job.
--
-- The state of a selection: `index`; `now`; `lease_ms`; `takeover`: true if jobs whose lease expired may be selected;
-- `want`: the number of rows that are still free, or this worker's share of the jobs; `rows`: the rows on this worker, see `count_rows`.

local MAX_COUNTS_OF_TENANT = 4 -- at once, so that one tenant's long prompts leave others the rest
local MOST_AHEAD = 64 -- tenants, and users of each, whose jobs are compared, beside those with a row

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
  move_to_leases(index, id, score, job.is_indexed and left_ms or math.min(left_ms, RECHECK_MS), selection.now)
end

local function may_take(selection, job)
  return selection.takeover or not job.lease_expired
end

local function add_row(rows, line, count)
  if not rows.users[line.jobs] then rows.lines = rows.lines + 1 end
  rows.users[line.jobs] = (rows.users[line.jobs] or 0) + (count or 1)
  rows.tenants[line.tenant] = (rows.tenants[line.tenant] or 0) + (count or 1)
end

-- Return the number of rows of each tenant by its name, of each user by its line, and the number of lines that have a
-- row. `names`: the tenant and the user of each row.
local function count_rows(names)
  local rows = { tenants = {}, users = {}, lines = 0 }
  for i = 1, #names, 2 do add_row(rows, line_of(names[i], names[i + 1])) end
  return rows
end

local function copy_rows(rows)
  local copy = { tenants = {}, users = {}, lines = rows.lines }
  for _, names in ipairs({ 'tenants', 'users' }) do
    for name, count in pairs(rows[names]) do copy[names][name] = count end
  end
  return copy
end

local function take_row(selection, job)
  add_row(selection.rows, job.line or line_of(job.tenant, job.user))
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

-- Return the members that begin with `prefix` and the stamp of a job that is due, at most `count`, the oldest first.
local function due_members(selection, lines, prefix, count)
  local found, due = {}, '(' .. prefix .. stamp(selection.now + 1)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', lines, '[' .. prefix, due, 'LIMIT', 0, count)) do
    local since, name = split_member(prefix, member)
    if tonumber(since) then
      found[#found + 1] = { name = name, since = tonumber(since) }
    else
      redis.call('ZREM', lines, member) -- not one of ours
    end
  end
  return found
end

-- Return the members of a tenant's users, with their lines. `want` users without a row on this worker are enough.
local function due_users(selection, lines, tenant, rows, want)
  local users = due_members(selection, lines, users_of(tenant), want + rows.lines)
  for _, user in ipairs(users) do user.line = line_of(tenant, user.name) end
  return users
end

-- Return the tenant of which the first job was queued first in this span of time, as a member of `lines`; nil if there is
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

-- Return the position of the next member: of those with the fewest rows, the one whose oldest job has waited longest.
local function next_member(members, rows_of)
  local best = 1
  for at, member in ipairs(members) do
    local difference = rows_of(member) - rows_of(members[best])
    if difference < 0 or (difference == 0 and member.since < members[best].since) then best = at end
  end
  return best
end

-- Return when the first job below `prefix` was queued, and its member; nil if none is due.
local function first_due(selection, lines, prefix)
  local first = first_of(lines, prefix)
  if not first then return nil end
  local since = tonumber((split_member(prefix, first)))
  if not since then
    redis.call('ZREM', lines, first) -- not one of ours
    return first_due(selection, lines, prefix)
  end
  if since <= selection.now then return since, first end
end

-- Return the member whose turn it is, and the first one below it; nil if nothing is left. Removes members with nothing
-- that is due. `parent`: what the members begin with; `prefix_of`: what those below one begin with.
local function in_turn(selection, lines, members, parent, prefix_of, rows_of)
  while #members > 0 do
    local at = next_member(members, rows_of)
    local member = members[at]
    local since, first = first_due(selection, lines, prefix_of(member))
    if not since then
      redis.call('ZREM', lines, parent .. stamp(member.since) .. member.name) -- if it was lost
      table.remove(members, at)
    elseif since > member.since then
      member.since = since
    else
      return member, first
    end
  end
end

-- Return the user of a tenant whose turn it is, and the member of its first job; nil if none is left.
local function user_in_turn(selection, lines, tenant, users, rows)
  return in_turn(selection, lines, users, users_of(tenant),
    function(user) return user.line.jobs end, function(user) return rows.users[user.line.jobs] or 0 end)
end

-- Remove the first count of a line, and return its job; nil if there is none that is due. Entries of jobs that do not
-- wait in a line are removed on the way, at most PAGE.
local function pop_count(selection, line)
  local index, counts = selection.index, selection.index.counts
  for _ = 1, PAGE do
    local _, first = first_due(selection, counts, line.jobs)
    if not first then return nil end
    change_line(counts, line, 'ZREM', first)
    local _, id = split_member(line.jobs, first)
    local job = waiting_job(selection, id)
    if job and job.expirations == 0 then return job end
    if job then index_job(index, id) end
  end
end

-- Return waiting token counts, those of the tenant with the oldest one first: at most `want`, and as many of a tenant as
-- it may have at once. Others wait, here or in their users' lines. `rows`: the counts that run on this worker.
local function counts_in_turn(selection, want, rows)
  local counts, jobs = selection.index.counts, {}
  if want < 1 then return jobs end
  -- At most `rows.lines` of the tenants may have no more.
  for _, tenant in ipairs(due_members(selection, counts, TENANTS, want + rows.lines)) do
    local users = due_users(selection, counts, tenant.name, rows, want)
    if #users == 0 then redis.call('ZREM', counts, TENANTS .. stamp(tenant.since) .. tenant.name) end -- it was lost
    while #jobs < want and (rows.tenants[tenant.name] or 0) < MAX_COUNTS_OF_TENANT do
      local user = user_in_turn(selection, counts, tenant.name, users, rows)
      local job = user and pop_count(selection, user.line)
      if not job then break end
      add_row(rows, user.line)
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
        take_row(selection, job)
        return job
      end
    end
  end
end

-- Return the tenants by the age of their oldest jobs. `want` tenants without a row on this worker are enough.
local function tenants_by_age(selection)
  return due_members(selection, selection.index.lines, TENANTS, selection.want + selection.rows.lines)
end

-- Return the line of the user whose turn it is, of the tenant whose turn it is, and the member of its first job; nil if
-- none is left.
local function line_in_turn(selection, tenants)
  local lines, rows = selection.index.lines, selection.rows
  while true do
    local tenant = in_turn(selection, lines, tenants, TENANTS,
      function(tenant) return users_of(tenant.name) end, function(tenant) return rows.tenants[tenant.name] or 0 end)
    if not tenant then return nil end
    tenant.users = tenant.users or due_users(selection, lines, tenant.name, rows, selection.want)
    local user, first = user_in_turn(selection, lines, tenant.name, tenant.users, rows)
    if user then return user.line, first end
    for at, each in ipairs(tenants) do -- the users that are left are for the next claim
      if each == tenant then table.remove(tenants, at) break end
    end
  end
end

-- Return the job of a member of a line if it waits, with its line; nil if it does not.
local function job_of_line(selection, line, id)
  local indexed = redis.call('ZSCORE', selection.index.jobs, id)
  local job = indexed and waiting_job(selection, id)
  if job then job.line, job.is_indexed_alike = line, indexed == job.score end
  return job or nil
end

-- Remove the first job of a line. Returns the job if it still waits there.
local function pop_first(selection, line, first)
  local index, first_stamp, id = selection.index, split_member(line.jobs, first)
  change_line(index.lines, line, 'ZREM', first)
  local job = job_of_line(selection, line, id)
  if not job then return nil end
  job.is_off_line = job.is_indexed_alike
  if stamp(job.score) ~= first_stamp or job.expirations > 0 then
    index_job(index, id)
    return nil
  end
  return job
end

-- Iterate over waiting jobs until all rows are taken. It begins with the tenant that has the fewest rows here, and of
-- its users with the one that has the fewest; of one user the oldest job comes first. Each must be claimed before the
-- next.
local function jobs_in_turn(selection)
  local tenants, tries = tenants_by_age(selection), PAGE
  return function()
    while selection.want > 0 and tries > 0 do
      local line, first = line_in_turn(selection, tenants)
      if not line then return nil end
      local job = pop_first(selection, line, first)
      if job and not is_past_deadline(job, selection.now) then
        take_row(selection, job)
      else -- the job takes no row, so another line may be the older one
        tenants, tries = tenants_by_age(selection), tries - 1
      end
      if job then return job end
    end
  end
end

-- Iterate over waiting jobs in the order of `jobs_in_turn`, and change none: each job has its `line`, and its `member` of
-- the lines. `rows`: the rows on this worker, and those of jobs that are met; the caller removes those that take none.
-- `claim` is called with jobs whose deadline has passed.
local function jobs_ahead(selection, rows, claim)
  local index, lines, met, tries = selection.index, selection.index.lines, {}, PAGE
  local most = MOST_AHEAD + rows.lines
  local tenants = due_members(selection, lines, TENANTS, most)

  -- Read the jobs of a user, a page at a time. Returns the member of the next one; nil if none is due.
  local function peek(user)
    if not user.page or user.at > #user.page then
      local from = user.page and '(' .. user.page[#user.page] or '[' .. user.line.jobs
      local due = '(' .. user.line.jobs .. stamp(selection.now + 1)
      user.page, user.at = redis.call('ZRANGEBYLEX', lines, from, due, 'LIMIT', 0, 16), 1
    end
    return user.page[user.at]
  end

  -- Return the member of the job that is next of a tenant, and its line; nil if there is none.
  local function next_of(tenant)
    tenant.users = tenant.users or due_members(selection, lines, users_of(tenant.name), most)
    while #tenant.users > 0 do
      local at = next_member(tenant.users, function(user)
        user.line = user.line or line_of(tenant.name, user.name)
        return rows.users[user.line.jobs] or 0
      end)
      local user = tenant.users[at]
      local member = peek(user)
      if member then user.at = user.at + 1 end
      local following = member and peek(user)
      user.since = following and tonumber((split_member(user.line.jobs, following)))
      if not user.since then table.remove(tenant.users, at) end -- also before a member that is not one of ours
      for place, each in ipairs(tenant.users) do
        tenant.since = place == 1 and each.since or math.min(tenant.since, each.since)
      end
      if member then return member, user.line end
    end
  end

  -- Return the job of a member if it waits there. Otherwise correct its place.
  local function look_at(member, line)
    local first_stamp, id = split_member(line.jobs, member)
    if met[id] then return nil end
    met[id] = true
    local job = job_of_line(selection, line, id)
    if not job or stamp(job.score) ~= first_stamp or job.expirations > 0 then
      job = pop_first(selection, line, member)
      if job then index_job(index, id) end -- it was moved here
    elseif is_past_deadline(job, selection.now) then
      change_line(lines, line, 'ZREM', member)
      claim(job)
    else
      job.member = member
      return job
    end
  end

  return function()
    while #tenants > 0 and tries > 0 do
      local at = next_member(tenants, function(tenant) return rows.tenants[tenant.name] or 0 end)
      local member, line = next_of(tenants[at])
      if member then
        tries = tries - 1
        local job = look_at(member, line)
        if job then
          add_row(rows, line)
          return job
        end
      else
        table.remove(tenants, at)
      end
    end
  end
end

-- Return the position of the job whose turn it is: of the tenants with the fewest rows, and of each the users with the
-- fewest, that with the least rank.
local function ranked_turn(rows, jobs)
  local least, users, best = math.huge, {}, nil
  for _, job in ipairs(jobs) do least = math.min(least, rows.tenants[job.line.tenant] or 0) end
  for _, job in ipairs(jobs) do
    local its = rows.users[job.line.jobs] or 0
    users[job.line.tenant] = math.min(users[job.line.tenant] or its, its)
  end
  for at, job in ipairs(jobs) do
    local tenant = job.line.tenant
    if (rows.tenants[tenant] or 0) == least and (rows.users[job.line.jobs] or 0) == users[tenant]
        and (not best or job.rank < jobs[best].rank) then best = at end
  end
  return best
end
