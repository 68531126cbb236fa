-- Find jobs by their ids.
-- KEYS  queues
-- ARGV  ids
-- Returns the ids that are in one of the queues.
local found = {}
for _, id in ipairs(ARGV) do
  for _, queue in ipairs(KEYS) do
    if type(redis.pcall('ZSCORE', queue, id)) == 'string' then
      found[#found + 1] = id
      break
    end
  end
end
return found
