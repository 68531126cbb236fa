-- Return a job to its queue as if it had never been claimed. The attempt number stays: it is the fence.
-- KEYS  job, lease, queue
-- ARGV  attempt, wake channel, phases of the job (see sluice/contract/phases.py) or ''
-- Returns 1, or 0 if this attempt no longer owns the job.
if not owns(KEYS[1], ARGV[1]) then return 0 end
redis.call('DEL', KEYS[2]) -- first: a full server refuses no write that follows one which frees memory
redis.call('HSET', KEYS[1], 'state', 'queued', 'worker', '')
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], 'phases', ARGV[3]) end
local index = index_of(KEYS[3])
if redis.call('EXISTS', index.jobs) == 1 then in_index(index_job, index, string.sub(KEYS[1], #'sluice:job:' + 1)) end
redis.call('PUBLISH', ARGV[2], '')
return 1
