-- The events of one decode step, all rows in one call.
-- KEYS  a row: job, log, channel
-- ARGV  life_ms; a row: attempt, seq, number of events, events ..., number of hash fields, field, value, ...
-- Returns two values for each row that was not written: its number from 1, and 'fenced' or the list's length.
local out, a, life_ms = {}, 2, ARGV[1]

local function take()
  a = a + 1
  return ARGV[a - 1]
end

local function take_list()
  local list = {}
  for i = 1, tonumber(take()) do list[i] = take() end
  return list
end

for row = 1, #KEYS / 3 do
  local job, log, channel = KEYS[row * 3 - 2], KEYS[row * 3 - 1], KEYS[row * 3]
  local attempt, seq = take(), tonumber(take())
  local events, fields, verdict = take_list(), take_list(), nil
  if owns(job, attempt) then
    verdict = append(log, channel, seq, events, life_ms)
    if verdict == 'conflict' then verdict = 'fenced' end
    if not verdict and #fields > 0 then redis.call('HSET', job, unpack(fields)) end
  else
    verdict = 'fenced'
  end
  if verdict then
    out[#out + 1] = row
    out[#out + 1] = verdict
  end
end
return out
