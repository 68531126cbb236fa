-- Store a response that has ended, unless it was deleted meanwhile.
-- KEYS  its record, the ended response
-- ARGV  the ended response as JSON, ttl_s
if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2]) end
