-- Make the index agree with its queue again, a bounded piece in each claim. Plain producers, workers and clients that
-- know no index, and people with redis-cli change the queue alone; a failover may lose keys.

local PAGE = 500 -- jobs looked at in one claim: about 3 ms

local function size(index)
  return redis.call('ZCARD', index.queue), redis.call('ZCARD', index.jobs)
end

-- Is the member at this rank of the queue at the same rank of the index, with the same score?
local function agrees(index, rank)
  local id, score = unpack(redis.call('ZRANGE', index.queue, rank, rank, 'WITHSCORES'))
  return id and redis.call('ZRANK', index.jobs, id) == rank and redis.call('ZSCORE', index.jobs, id) == score
end

-- The first rank from which queue and index differ, or nil. One that came and another that was removed behind our back
-- leave the sizes equal; every rank between the two differs then, so the last and any one are tried as well.
local function differs_from(index, now)
  local queued, indexed = size(index)
  local low, high = -1, nil -- agrees at low, not at high
  if queued ~= indexed then
    high = queued
  elseif queued > 0 and not agrees(index, queued - 1) then
    high = queued - 1
  elseif queued > 0 and not agrees(index, now % queued) then
    high = now % queued
  end
  while high and high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if agrees(index, middle) then low = middle else high = middle end
  end
  return high
end

-- One page from this rank. Returns how many jobs got a place or lost theirs.
local function mend_page(index, rank)
  local mended = 0
  local extra = redis.call('ZRANGE', index.jobs, rank, rank + PAGE - 1)
  for _, id in ipairs(extra) do
    if not redis.call('ZSCORE', index.queue, id) then
      leave_index(index, id)
      mended = mended + 1
    end
  end
  local queued = redis.call('ZRANGE', index.queue, rank, rank + PAGE - 1, 'WITHSCORES')
  for i = 1, #queued, 2 do
    if redis.call('ZSCORE', index.jobs, queued[i]) ~= queued[i + 1] then
      place(index, queued[i])
      mended = mended + 1
    end
  end
  return mended
end

-- Every indexed job has one place; a line may still hold one that has gone, until its turn comes.
local function is_whole(index)
  local places = redis.call('ZLEXCOUNT', index.lines, '[w', '(x') + redis.call('ZCARD', index.suspects)
    + redis.call('ZCARD', index.leases)
  local with_deadline = redis.call('ZCARD', index.deadlines) > 0
  if with_deadline ~= (redis.call('ZSCORE', index.lines, 'd') ~= false) then return false end
  local indexed = redis.call('ZCARD', index.jobs)
  return places >= indexed and (indexed > 0 or places == 0)
end

-- Is there a queue at all?
local function exists(queue)
  local kind = redis.call('TYPE', queue).ok
  if kind == 'zset' then return true end
  if kind ~= 'none' then found_foreign(queue, 'a ' .. kind .. ', no sorted set') end
  return false
end

-- Returns 1 if there is more to mend, else 0.
local function mend(index, now)
  local readable, whole = pcall(is_whole, index)
  if not readable or not whole then drop_index(index) end
  local rank = differs_from(index, now)
  if not rank then return 0 end
  redis.call('PEXPIRE', index.jobs, INDEX_LIFE_MS) -- a full server takes it, and then whatever this script writes
  local mended = mend_page(index, rank)
  local queued, indexed = size(index)
  return mended > 0 and queued ~= indexed and 1 or 0
end

local function keep(index)
  for _, name in ipairs({ 'jobs', 'lines', 'suspects', 'leases', 'deadlines' }) do
    redis.call('PEXPIRE', index[name], INDEX_LIFE_MS)
  end
end
