-- The fence of a job and the writing of its log. `sluice/contract/scripts.py` puts this file, and index.lua, in front of
-- each script that writes to a job: append.lua and final.lua of the worker, cancel.lua, submit.lua and others.

local FINAL = { finished = true, failed = true, cancelled = true }

-- The fence: return true if this attempt still owns the job, and the job has not ended.
local function owns(job, attempt)
  local stored = redis.pcall('HMGET', job, 'attempt', 'state') -- an error if it is not a hash: no attempt owns it
  return stored[1] == attempt and stored[2] == 'running'
end

-- Append events, the first at index `seq`. Equal events at their index are skipped, so a call may be repeated if its
-- reply was lost. Returns nil, or the length of a list that is shorter than `seq`, or 'conflict'; and the number of
-- subscribers that received the last event.
local function append(log, channel, seq, events, life_ms)
  local length, receivers = redis.pcall('LLEN', log), 0
  if type(length) ~= 'number' then return 'conflict' end -- a foreign value: it must not stop the other rows
  if length < seq then return length end
  for k, event in ipairs(events) do
    local at = seq + k - 1
    if at >= length then
      redis.call('RPUSH', log, event)
      if at == 0 then redis.call('PEXPIRE', log, life_ms) end
      receivers = redis.call('PUBLISH', channel, event)
    elseif redis.call('LINDEX', log, at - length) ~= event then
      return 'conflict'
    end
  end
  return nil, receivers
end

local function milliseconds()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
