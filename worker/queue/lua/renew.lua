-- Renew the leases of running jobs. A lease that expired is set again if no other worker has taken the job.
-- KEYS  a job: job, lease, log
-- ARGV  lease_ms, life_ms, worker; a job: attempt
-- Returns the numbers, from 1, of the jobs that this worker no longer owns.
local lost = {}
for i = 1, #KEYS / 3 do
  local job, lease, log, attempt = KEYS[i * 3 - 2], KEYS[i * 3 - 1], KEYS[i * 3], ARGV[3 + i]
  if owns(job, attempt) then
    if redis.call('PEXPIRE', lease, ARGV[1]) == 0 then -- a full server allows PEXPIRE, but not SET
      redis.call('SET', lease, ARGV[3] .. ':' .. attempt, 'PX', ARGV[1])
    end
    redis.call('PEXPIRE', job, ARGV[2])
    redis.call('PEXPIRE', log, ARGV[2])
  else
    lost[#lost + 1] = i
  end
end
return lost
