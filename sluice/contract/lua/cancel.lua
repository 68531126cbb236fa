-- Cancel a job: a waiting job ends at once; for a running job, its worker is asked to end it.
-- KEYS  queues in which it may wait, in addition to the one that its state names
-- ARGV  id, life_ms, log_ttl_ms, result_ttl_ms, the ms for which a request to cancel a running job is stored ('': no
--       request is made), an id of this cancellation ('': none)
-- Returns 'cancelled', also if the call is repeated with its id because the reply was lost; 'ended' if the job had
-- ended before; 'requested'; or 'lost': as 'requested', but the job has a body and is in none of the queues. The last
-- two are followed by the error if the request could not be stored.
local id, lives = ARGV[1], { job = ARGV[2], log = ARGV[3], result = ARGV[4] }
local job, cancel_key = 'sluice:job:' .. id, 'sluice:cancel:' .. id

local fields = redis.pcall('HMGET', job, 'state', 'model', 'lane', 'cancellation')
if fields.err then fields = {} end
if FINAL[fields[1]] then
  redis.call('DEL', cancel_key)
  return { ARGV[6] ~= '' and fields[4] == ARGV[6] and 'cancelled' or 'ended' }
end

local queue = queue_of_job(id, KEYS, fields[2], fields[3])
if queue and not has_lease(id) then
  end_without_worker(id, queue, 'cancelled', '"reason":"requested"', lives)
  if ARGV[6] ~= '' then redis.call('HSET', job, 'cancellation', ARGV[6]) end
  return { 'cancelled' }
end
if ARGV[5] == '' then return { 'requested' } end

-- In this order: a worker that misses the message finds the key when it claims the job.
local stored = redis.pcall('SET', cancel_key, '1', 'PX', ARGV[5])
redis.call('PUBLISH', 'sluice:control', id)
local lost = not queue and fields[1] ~= 'running' and redis.call('EXISTS', 'arq:job:' .. id) == 1
return { lost and 'lost' or 'requested', stored.err and stored or nil }
