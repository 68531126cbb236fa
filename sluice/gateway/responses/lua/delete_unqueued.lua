-- Delete the record of a response whose job was not queued.
-- KEYS  record, and the keys that a job of the response has: its state, its body
-- ARGV  the SHA-1 of the record
-- Returns 1, or 0 if the record is another request's or a job exists.
local record = redis.call('GET', KEYS[1])
if not record or redis.sha1hex(record) ~= ARGV[1] then return 0 end
if redis.call('EXISTS', KEYS[2], KEYS[3]) > 0 then return 0 end
return redis.call('DEL', KEYS[1])
