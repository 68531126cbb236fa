-- Repair differences between the index and its queue, a bounded part in each claim. Plain arq producers, versions
-- without an index and commands in redis-cli change only the queue, and a failover may lose keys.

local PAGE = 500  -- jobs repaired in one claim: about 3 ms
local SAMPLE = 64 -- jobs compared in one claim

local function size(index)
  return redis.call('ZCARD', index.queue), redis.call('ZCARD', index.jobs)
end

-- True if queue and index have the same member with the same score at this rank.
local function agrees(index, rank)
  local id, score = unpack(redis.call('ZRANGE', index.queue, rank, rank, 'WITHSCORES'))
  return id and redis.call('ZRANK', index.jobs, id) == rank and redis.call('ZSCORE', index.jobs, id) == score
end

-- Return the first rank at which a part of queue and index differs, or nil. Each claim compares another part, so all of
-- a short queue.
local function sample_differs_at(index, queued, now)
  local from = now % math.ceil(queued / SAMPLE) * SAMPLE
  local copy = redis.call('ZRANGE', index.jobs, from, from + SAMPLE - 1, 'WITHSCORES')
  for at, value in ipairs(redis.call('ZRANGE', index.queue, from, from + SAMPLE - 1, 'WITHSCORES')) do
    if copy[at] ~= value then return from + math.floor((at - 1) / 2) end
  end
end

-- Return the first rank from which queue and index differ, or nil. If one job was added and another removed without the
-- index, the sizes are equal but every rank between the two differs, so the last rank and a sample are compared too.
local function differs_from(index, now)
  local queued, indexed = size(index)
  local low, high = -1, nil -- agrees at low, not at high
  if queued ~= indexed then
    high = queued
  elseif queued > 0 and not agrees(index, queued - 1) then
    high = queued - 1
  elseif queued > 0 then
    high = sample_differs_at(index, queued, now)
  end
  while high and high - low > 1 do
    local middle = math.floor((low + high) / 2)
    if agrees(index, middle) then low = middle else high = middle end
  end
  return high
end

-- Repair one page from this rank. Returns the number of jobs that were added, moved or removed.
local function reconcile_page(index, rank)
  local changed = 0
  local extra = redis.call('ZRANGE', index.jobs, rank, rank + PAGE - 1)
  for _, id in ipairs(extra) do
    if not redis.call('ZSCORE', index.queue, id) then
      remove_from_index(index, id)
      changed = changed + 1
    end
  end
  local queued = redis.call('ZRANGE', index.queue, rank, rank + PAGE - 1, 'WITHSCORES')
  for i = 1, #queued, 2 do
    if bytes_to_read <= 0 then break end -- the next claim goes on
    if redis.call('ZSCORE', index.jobs, queued[i]) ~= queued[i + 1] then
      index_job(index, queued[i])
      changed = changed + 1
    end
  end
  return changed
end

-- True if the parts of the index are consistent: every indexed job has a place. A line may still hold a
-- job that has left the queue, until its turn comes.
local function is_consistent(index)
  local places = redis.call('ZLEXCOUNT', index.lines, '[w', '(x') + redis.call('ZCARD', index.suspects)
    + redis.call('ZCARD', index.leases)
  redis.call('ZCARD', index.counts) -- an error for a foreign value
  local with_deadline = redis.call('ZCARD', index.deadlines) > 0
  if with_deadline ~= (redis.call('ZSCORE', index.lines, 'd') ~= false) then return false end
  local indexed = redis.call('ZCARD', index.jobs)
  return places >= indexed and (indexed > 0 or places == 0)
end

-- True if there is a queue. Deletes a foreign value at its key.
local function queue_exists(queue)
  local kind = redis.call('TYPE', queue).ok
  if kind == 'zset' then return true end
  if kind ~= 'none' then delete_foreign(queue, 'a ' .. kind .. ', no sorted set') end
  return false
end

-- Repair a part of the index. Returns 1 if there is more to repair, else 0.
local function reconcile(index, now)
  local readable, consistent = pcall(is_consistent, index)
  if not readable or not consistent then drop_index(index) end
  local rank = differs_from(index, now)
  if not rank then return 0 end
  redis.call('PEXPIRE', index.jobs, INDEX_LIFE_MS) -- a full server accepts it, and then all writes of this script
  return reconcile_page(index, rank) > 0 and differs_from(index, now) and 1 or 0
end

local function renew_index(index)
  for _, name in ipairs({ 'jobs', 'lines', 'suspects', 'leases', 'deadlines', 'counts' }) do
    redis.call('PEXPIRE', index[name], INDEX_LIFE_MS)
  end
end
