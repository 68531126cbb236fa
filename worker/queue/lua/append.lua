-- Append the events of one decode step, all rows in one call: `owns` and `append` are functions of job_log.lua in
-- sluice/contract/lua.
-- KEYS  a row: job
-- ARGV  life_ms; a row: 'attempt seq watch events fields', then that number of events, then that number of name-value
--       pairs for the job's hash. One header instead of five arguments, since packing arguments is most of the cost.
-- Returns two values for each row that was not written: its number from 1, and 'fenced' or the list's length. For a
-- row that was written with watch = 1 and whose last event had no subscriber: its number and 'alone'.
local out, at = {}, 1  -- ARGV[1] is life_ms

local function take(count)
  local taken = {}
  for i = 1, count do taken[i] = ARGV[at + i] end
  at = at + count
  return taken
end

for row, job in ipairs(KEYS) do
  local id = string.sub(job, #'sluice:job:' + 1)
  local attempt, seq, watch, events, pairs = string.match(take(1)[1], '(%d+) (%d+) (%d) (%d+) (%d+)')
  events, pairs = take(tonumber(events)), take(2 * tonumber(pairs))
  local verdict, receivers = 'fenced', 0
  if owns(job, attempt) then
    verdict, receivers = append('sluice:log:' .. id, 'sluice:ch:' .. id, tonumber(seq), events, ARGV[1])
    if verdict == 'conflict' then verdict = 'fenced' end
    if not verdict and #pairs > 0 then redis.call('HSET', job, unpack(pairs)) end
    if not verdict and watch == '1' and receivers == 0 then verdict = 'alone' end
  end
  if verdict then
    out[#out + 1] = row
    out[#out + 1] = verdict
  end
end
return out
