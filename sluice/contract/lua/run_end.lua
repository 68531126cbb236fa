-- Store the end of an offline run, and tell webhooks of it, unless it is stored already.
-- KEYS  its status, its channel, the request to cancel it
-- ARGV  the status as JSON, its life in seconds, 1 if it is published, the run's id, the state, the time of the end, the
--       tenant or ''
local known = redis.pcall('GET', KEYS[1]) == ARGV[1]
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
if ARGV[3] == '1' then
  redis.call('PUBLISH', KEYS[2], ARGV[1])
  redis.call('DEL', KEYS[3])
end
if not known then notify('batch', ARGV[5], ARGV[4], ARGV[7], ARGV[6]) end
