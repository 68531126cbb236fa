-- Keep the leases of running jobs; one that ran out while nobody else took the job is taken again.
-- KEYS  a job: job, lease, log
-- ARGV  lease_ms, life_ms, worker; a job: attempt
-- Returns the numbers, from 1, of the jobs that are no longer ours.
local lost = {}
for i = 1, #KEYS / 3 do
  local job, lease, log, attempt = KEYS[i * 3 - 2], KEYS[i * 3 - 1], KEYS[i * 3], ARGV[3 + i]
  if owns(job, attempt) then
    if redis.call('PEXPIRE', lease, ARGV[1]) == 0 then -- which a full server does not refuse, as it does SET
      redis.call('SET', lease, ARGV[3] .. ':' .. attempt, 'PX', ARGV[1])
    end
    redis.call('PEXPIRE', job, ARGV[2])
    redis.call('PEXPIRE', log, ARGV[2])
  else
    lost[#lost + 1] = i
  end
end
return lost
