-- Free an Idempotency-Key whose request was refused.
-- KEYS  the registration, and the keys that a job has which was queued under it
-- ARGV  the registration by the request
-- Returns 1, or 0 if the registration is another's or a job exists.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
for i = 2, #KEYS do
  if redis.call('EXISTS', KEYS[i]) == 1 then return 0 end
end
return redis.call('DEL', KEYS[1])
