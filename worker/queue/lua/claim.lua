-- Claim up to `want` waiting jobs of one queue, at a cost that does not depend on its length.
-- KEYS  queue
-- ARGV  by name: want, counts (token counts to claim besides: they take no row), lease_ms, worker, lane, life_ms,
--       max_body_bytes, takeover (1 if expired leases may be taken over), suspects (number of suspects on probation
--       here), reply_lost (1 if an earlier reply may have been lost), left_at (Unix milliseconds: jobs that were queued
--       until then have been left to other workers for long enough; 0: none), wake (a channel to wake the workers that
--       jobs are left to, or ''), rows_changed (1: tell the other workers `worker_rows` also without a queue);
--       lists: running (ids of the jobs that run on this worker; only used with reply_lost), rows (the tenant and the
--       user of each row that runs on this worker), resume_fields (fields of the job's hash to return), count_rows (the
--       tenant and the user of each token count that runs on this worker), worker_rows (see share.lua; empty: share with no other worker)
-- Returns by name: more (1 if more of the index must be repaired, else 0), next_due_ms (until a further job is due that
-- a row is free for; 0: none), left (1 if jobs were left to other workers, else 0), now (Unix milliseconds), foreign
-- (descriptions of foreign values that were deleted), and claims: for each claimed job the members of `Claim`, by name.
--
-- Tenants take turns, beginning with the one that has the fewest rows on this worker, and so do the users of a tenant;
-- a user's oldest job comes first. A job whose deadline has passed is claimed at once and in addition to `want`: it only has to end.
-- A job that was running when its worker died is a suspect. It is on probation until the worker that took it over has
-- generated a new token for it (after a second expired lease: until its end). A worker has one job on probation at a
-- time. A crash in that time counts against the job, and after three it fails. It does not count against other jobs.
local arguments = read_arguments({ running = true, rows = true, resume_fields = true, count_rows = true,
  worker_rows = true })
local index, now, claims = index_of(KEYS[1]), milliseconds(), {}
local fleet = fleet_of(KEYS[1], arguments, now)

local function claim(job)
  claims[#claims + 1] = take_ownership(index, job, arguments, now)
end

-- Claim this worker's share of the jobs that wait in turn. Returns true if jobs are left to other workers.
local function claim_share(selection)
  local free, left_at = selection.want, tonumber(arguments.left_at)
  read_others(fleet)
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
  if arguments.rows_changed == '1' then store_rows(fleet) end
  return { 'more', 0, 'next_due_ms', 0, 'left', 0, 'now', now, 'foreign', notes, 'claims', claims }
end
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
if left and arguments.wake ~= '' then redis.call('PUBLISH', arguments.wake, '') end
renew_index(index)
local due_ms = selection.want > 0 and next_due_ms(selection) or 0
return { 'more', more, 'next_due_ms', due_ms, 'left', left and 1 or 0, 'now', now, 'foreign', notes, 'claims', claims }
