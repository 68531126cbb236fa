-- Take the turn to restart among the workers of a model, unless another has it; with a time of 0, end one's own.
-- KEYS  the turn
-- ARGV  worker, turn_ms
-- Returns the worker that has the turn, or had it.
local holder = redis.pcall('GET', KEYS[1])
if type(holder) == 'string' and holder ~= ARGV[1] then return holder end
if ARGV[2] ~= '0' then
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
elseif holder then
  redis.call('DEL', KEYS[1])
end
return ARGV[1]
