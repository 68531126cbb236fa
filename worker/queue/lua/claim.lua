-- Claim up to `want` waiting jobs of one queue, at a cost that does not depend on its length.
-- KEYS  queue
-- ARGV  want, lease_ms, worker, lane, life_ms, most_body_bytes, 1 if expired leases may be taken over (else 0),
--       number of suspects on probation here, 1 if an earlier reply may have been lost (else 0),
--       number of ids that follow, ids of the jobs that run on this worker, then tenant and its running rows, in pairs
-- Returns 1 if more of the index must be repaired (else 0); descriptions of foreign values that were deleted; and for
-- each claimed job a list of names and values, the members of `Claim`.
--
-- Tenants take turns, beginning with the one that has the fewest rows on this worker; a tenant's oldest job comes
-- first. A job whose deadline has passed is claimed at once and in addition to `want`: it only has to end.
-- A job that was running when its worker died is a suspect. It is on probation until the worker that took it over has
-- generated a new token for it (after a second expired lease: until its end). A worker has one job on probation at a
-- time. A crash in that time counts against the job, and after three it fails. It does not count against other jobs.
local index, want, lease_ms, worker, lane = index_of(KEYS[1]), tonumber(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local most_bytes, takeover, suspects, reply_lost = tonumber(ARGV[6]), ARGV[7] == '1', tonumber(ARGV[8]), ARGV[9] == '1'
local now, claimed, known_ids, rows = milliseconds(), {}, {}, {}
for i = 11, 10 + tonumber(ARGV[10]) do known_ids[ARGV[i]] = true end
for i = 11 + tonumber(ARGV[10]), #ARGV, 2 do
  local line = line_of(ARGV[i])
  rows[line] = (rows[line] or 0) + tonumber(ARGV[i + 1])
end

local function schedule_lease_check(id, left_ms)
  redis.call('ZADD', index.leases, now + math.min(left_ms, RECHECK_MS), id)
end

local function body_of(id, expired)
  local key = 'arq:job:' .. id
  local bytes = redis.pcall('STRLEN', key)
  if type(bytes) ~= 'number' then bytes = 0 end -- a foreign value: the job ends like one without a body
  local wanted = bytes > 0 and bytes <= most_bytes and not expired -- no body if so, since thousands may expire together
  return wanted and redis.call('GET', key) or '', bytes
end

local function events_of(id)
  local key = 'sluice:log:' .. id
  local events = redis.pcall('LLEN', key)
  if type(events) == 'number' then return events end
  delete_foreign(key, 'no list')
  return 0
end

-- Claim the job for this worker. Returns false if its deadline has passed.
local function claim(id, score, info)
  local job = 'sluice:job:' .. id
  remove_from_index(index, id)
  redis.call('ZADD', index.jobs, score, id)
  schedule_lease_check(id, tonumber(lease_ms))
  local attempt = redis.call('HINCRBY', job, 'attempt', 1)
  local crashes = redis.call('HINCRBY', job, 'crashes', info.counts_as_crash and 1 or 0)
  if info.expirations > 0 then redis.call('HSET', job, 'lapses', info.expirations, 'probation', 1) end
  redis.call('SET', 'arq:in-progress:' .. id, worker .. ':' .. attempt, 'PX', lease_ms)
  redis.call('HSET', job, 'state', 'running', 'worker', worker, 'lane', lane, 'started_at', now / 1000)
  redis.call('PEXPIRE', job, ARGV[5])
  redis.call('PEXPIRE', 'sluice:log:' .. id, ARGV[5])
  local expired = info.deadline ~= nil and info.deadline < now
  local body, bytes = body_of(id, expired)
  claimed[#claimed + 1] = { 'id', id, 'attempt', attempt, 'crashes', crashes, 'lease_expirations', info.expirations,
    'cancelled', redis.call('EXISTS', 'sluice:cancel:' .. id), 'expired', expired and 1 or 0,
    'queued_ms', score, 'events', events_of(id), 'body', body, 'body_bytes', bytes, 'tenant', info.tenant,
    'specprefill', redis.call('HGET', job, 'specprefill') or '',
    'images_digest', redis.call('HGET', job, 'images') or '' }
  return not expired
end

-- Return the score and state of a job if it waits. Otherwise correct its place in the index and return nil.
local function still_waits(id)
  local score = redis.call('ZSCORE', index.queue, id)
  local info = score and read_job(id)
  if not info or FINAL[info.state] then
    index_job(index, id)
    return nil
  end
  local left_ms = lease_left(id, lease_ms)
  if not left_ms then return score, info end
  remove_from_index(index, id)
  redis.call('ZADD', index.jobs, score, id)
  schedule_lease_check(id, left_ms)
end

-- Requeue claims of this worker whose reply was lost: it has not started these jobs.
local function requeue_lost_claims()
  for _, id in ipairs(redis.call('ZRANGE', index.leases, 0, -1)) do
    local _, owner = lease_left(id, lease_ms)
    if not known_ids[id] and owner and string.sub(owner, 1, #worker + 1) == worker .. ':' then
      redis.pcall('HSET', 'sluice:job:' .. id, 'state', 'queued')
      redis.call('DEL', 'arq:in-progress:' .. id)
      redis.call('ZADD', index.leases, 0, id)
    end
  end
end

-- Check the leases that are due for a check, at most PAGE. Jobs without a lease wait again.
local function check_leases()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', index.leases, '-inf', now, 'LIMIT', 0, PAGE)) do
    local score, info = still_waits(id)
    if score and (takeover or not info.lease_expired) then
      remove_from_index(index, id)
      add_to_index(index, id, score, info)
    end
  end
end

local function take_expired()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', index.deadlines, '-inf', now, 'LIMIT', 0, PAGE)) do
    local score, info = still_waits(id)
    if score and (takeover or not info.lease_expired) then
      delete_deadline(index, id)
      if info.deadline and info.deadline < now then claim(id, score, info) end
    end
  end
end

-- Claim one suspect, of those with the fewest crashes: if workers die repeatedly for another reason, no suspect is
-- tried twice while others wait.
local function take_suspect()
  for _ = 1, PAGE do
    local id = redis.call('ZRANGE', index.suspects, 0, 0)[1]
    if not id then return end
    local score, info = still_waits(id)
    if score and info.lease_expired and not takeover then return end
    if score and claim(id, score, info) then
      local line = line_of(info.tenant)
      rows[line], want = (rows[line] or 0) + 1, want - 1
      return
    end
  end
end

-- Return lines by the age of their oldest job. `want` lines without a row on this worker are enough.
local function lines_by_age()
  local count, lines = want, {}
  for _ in pairs(rows) do count = count + 1 end
  local heads = redis.call('ZRANGEBYLEX', index.lines, '[h', '(h' .. stamp(now + 1), 'LIMIT', 0, count)
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
local function next_line(lines)
  local best = 1
  for at, line in ipairs(lines) do
    local difference = (rows[line.name] or 0) - (rows[lines[best].name] or 0)
    if difference < 0 or (difference == 0 and line.since < lines[best].since) then best = at end
  end
  return best
end

-- Remove the first job of a line, and claim it if it still waits there. Returns true if it takes a row.
local function take_first(line, first)
  local first_stamp, id = split_member(line, first)
  remove_from_line(index, line, first)
  local score, info = nil, nil
  if redis.call('ZSCORE', index.jobs, id) then score, info = still_waits(id) end
  if not score then return false end
  if stamp(score) ~= first_stamp or info.expirations > 0 then
    index_job(index, id)
    return false
  end
  return claim(id, score, info)
end

-- Return when the first job of a line was queued, and its member of `lines`; nil if none is due.
local function first_due(line)
  local first = first_of(index, line)
  if not first then return nil end
  local since = tonumber((split_member(line, first)))
  if not since then
    redis.call('ZREM', index.lines, first) -- not one of ours
    return first_due(line)
  end
  if since <= now then return since, first end
end

local function take_in_turn()
  local lines, tries = lines_by_age(), PAGE
  while want > 0 and tries > 0 and #lines > 0 do
    local at = next_line(lines)
    local line = lines[at]
    local since, first = first_due(line.name)
    if not since then
      redis.call('ZREM', index.lines, 'h' .. stamp(line.since) .. line.name)
      table.remove(lines, at)
    elseif since > line.since then
      line.since = since
    elseif take_first(line.name, first) then
      rows[line.name], want = (rows[line.name] or 0) + 1, want - 1
    else -- the job did not wait, so another line may be the older one
      lines, tries = lines_by_age(), tries - 1
    end
  end
end

if not queue_exists(index.queue) then
  drop_index(index)
  return { 0, notes, {} }
end
local more = reconcile(index, now)
if reply_lost then requeue_lost_claims() end
check_leases()
take_expired()
if want > 0 and suspects == 0 then take_suspect() end
if want > 0 then take_in_turn() end
renew_index(index)
return { more, notes, claimed }
