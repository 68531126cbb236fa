-- Queue one job and wake the workers, unless its id is known.
-- KEYS  body, queue, job, wake channel
-- ARGV  id, body, life_ms, lane, tenant or '', deadline_s or ''
-- Returns 1 or 0 for new or known, and the job's state.
local state = redis.call('HGET', KEYS[3], 'state')
if state then return { 0, state } end
if redis.call('EXISTS', KEYS[1]) == 1 then return { 0, 'queued' } end

local t = redis.call('TIME')
local now_ms = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[2], now_ms, ARGV[1])
redis.call('HSET', KEYS[3], 'state', 'queued', 'lane', ARGV[4], 'queued_at', now_ms / 1000)
if ARGV[5] ~= '' then redis.call('HSET', KEYS[3], 'tenant', ARGV[5]) end
if ARGV[6] ~= '' then redis.call('HSET', KEYS[3], 'deadline', now_ms / 1000 + ARGV[6]) end
redis.call('PEXPIRE', KEYS[3], ARGV[3])
redis.call('PUBLISH', KEYS[4], '')
return { 1, 'queued' }
