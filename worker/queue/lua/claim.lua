-- Claim up to `want` waiting jobs of one queue, at a cost that does not depend on its length.
-- KEYS  queue
-- ARGV  by name: want, counts (token counts to claim besides: they take no row), lease_ms, worker, lane, life_ms,
--       max_body_bytes, takeover (1 if expired leases may be taken over), suspects (number of suspects on probation
--       here), reply_lost (1 if an earlier reply may have been lost), left_at (Unix milliseconds: jobs that were queued
--       until then have been left to other workers for long enough; 0: none), wake (a channel to wake the workers that
--       jobs are left to, or ''), rows_changed (1: tell the other workers `worker_rows` and `record` also without a
--       queue), wid, record and ready_ms (what this worker tells others by which it chooses jobs: see affinity.lua; '': jobs are taken in
--       turn, as below), per_tenant (1 if tenants share no prefix cache);
--       lists: running (ids of the jobs that run on this worker; only used with reply_lost), rows (the tenant and the
--       user of each row that runs on this worker), resume_fields (fields of the job's hash to return), count_rows (the
--       tenant and the user of each token count that runs on this worker), worker_rows (see share.lua; empty: share with no other worker)
-- Returns by name: more (1 if more of the index must be repaired, else 0), next_due_ms (until a further job is due that
-- a row is free for; 0: none), left (1 if jobs were left to other workers, else 0), now (Unix milliseconds), foreign
-- (descriptions of foreign values that were deleted), again_ms, cache, load, overruled and scanned (see `choose_jobs`), and
-- claims: for each claimed job the members of `Claim`, and marks, bytes and expected_tokens (see `hold`), by name.
--
-- Tenants take turns, beginning with the one that has the fewest rows on this worker, and so do the users of a tenant;
-- a user's oldest job comes first. A job whose deadline has passed is claimed at once and in addition to `want`: it only has to end.
-- A job that was running when its worker died is a suspect. It is on probation until the worker that took it over has
-- generated a new token for it (after a second expired lease: until its end). A worker has one job on probation at a
-- time. A crash in that time counts against the job, and after three it fails. It does not count against other jobs.
local arguments = read_arguments({ running = true, rows = true, resume_fields = true, count_rows = true,
  worker_rows = true })
local index, now, claims = index_of(KEYS[1]), milliseconds(), {}
local fleet, affinity = fleet_of(KEYS[1], arguments, now), nil
local chosen = { again = 0, cache = 0, load = 0, overruled = {}, scanned = 0 }

local function claim(job)
  local taken, marks, bytes, tokens = take_ownership(index, job, arguments, now), '', 0, 0
  if affinity and not is_past_deadline(job, now) then marks, bytes, tokens = hold(affinity, read_prompt(affinity, job)) end
  for _, value in ipairs({ 'marks', marks, 'bytes', bytes, 'expected_tokens', tokens }) do taken[#taken + 1] = value end
  claims[#claims + 1] = taken
end

local function reply(more, due_ms, left)
  return { 'more', more, 'next_due_ms', due_ms, 'left', left and 1 or 0, 'now', now, 'foreign', notes,
    'again_ms', chosen.again, 'cache', chosen.cache, 'load', chosen.load, 'overruled', chosen.overruled,
    'scanned', chosen.scanned, 'claims', claims }
end

-- Claim the jobs that this worker is done with soonest, but of those that nobody knows its share alone. Returns nil if
-- jobs are to be claimed in turn, else true if some are left to other workers.
local function claim_chosen(selection, left_at)
  local free, waiting, share = selection.want, num_waiting(selection), nil
  local found = choose_jobs(affinity, selection, function(job, taken)
    share = share or share_of(fleet, waiting, free)
    if left_at > 0 and job.queued <= left_at then -- nobody has taken it in time
      forget_late(fleet, left_at)
      share, left_at = share_of(fleet, waiting, free), 0
    end
    return taken >= share
  end, claim)
  if not found then return nil end
  chosen = found
  count_claimed(fleet, free - selection.want)
  return found.kept
end

-- Claim this worker's share of the jobs that wait in turn. Returns true if jobs are left to other workers.
local function claim_share(selection)
  local free, left_at = selection.want, tonumber(arguments.left_at)
  read_others(fleet)
  local left = affinity and claim_chosen(selection, left_at)
  if affinity and left ~= nil then return left end
  if left_at > 0 and head_between(selection, 0, left_at) then forget_late(fleet, left_at) end
  selection.want = share_of(fleet, num_waiting(selection), free)
  local kept = free - selection.want
  for job in jobs_in_turn(selection) do claim(job) end
  selection.want = selection.want + kept
  count_claimed(fleet, free - selection.want)
  return selection.want > 0 and head_between(selection, 0, now) ~= nil
end

if not queue_exists(index.queue) then
  drop_index(index)
  if arguments.rows_changed == '1' then -- idle workers claim four times a second
    store_rows(fleet)
    affinity = affinity_of(KEYS[1], arguments, now)
    if affinity then store_affinity(affinity) end
  end
  return reply(0, 0, false)
end
affinity = affinity_of(KEYS[1], arguments, now)
local more = reconcile(index, now)
if arguments.reply_lost == '1' then requeue_lost_claims(index, arguments) end
local selection = {
  index = index, now = now, lease_ms = arguments.lease_ms, takeover = arguments.takeover == '1',
  want = tonumber(arguments.want), rows = count_rows(arguments.rows)
}
check_leases(selection)
for _, job in ipairs(jobs_past_deadline(selection)) do claim(job) end
for _, job in ipairs(counts_in_turn(selection, tonumber(arguments.counts), count_rows(arguments.count_rows))) do claim(job) end
if selection.want > 0 and arguments.suspects == '0' then
  for job in suspects(selection) do claim(job) end
  count_claimed(fleet, tonumber(arguments.want) - selection.want)
end
local left = selection.want > 0 and claim_share(selection)
store_rows(fleet)
if affinity then
  store_affinity(affinity)
  local is_filled = affinity.leaves and tonumber(arguments.want) > 0 and selection.want == 0
  if is_filled and head_between(selection, 0, now) then wake_others(affinity) end
end
if left and arguments.wake ~= '' then redis.call('PUBLISH', arguments.wake, '') end
renew_index(index)
local due_ms = selection.want > 0 and next_due_ms(selection) or 0
return reply(more, due_ms, left)
