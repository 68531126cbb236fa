-- The limits of one key, as two buckets that refill within a minute: requests and tokens.
-- reserve: count a request and reserve tokens for each job, all of them or none, unless the buckets hold less. A job is
--       counted once, however often it is sent; without jobs and further requests the buckets are only read.
--   KEYS  buckets, the reservations of the jobs
--   ARGV  'reserve', requests a minute (0: no limit), tokens a minute (0: no limit), tokens of each job, requests
--         without a job, life_ms of the reservations, a mark of the caller for `settle`
--   Returns 1 or 0 (refused), requests left, tokens left, milliseconds until it would fit, 'requests' or 'tokens'
-- settle: replace reservations by the tokens that were used. Has no effect the second time.
--   KEYS  reservations
--   ARGV  'settle', tokens, life_ms of the mark that a job is settled (0: none, so it can be counted again), the mark of
--         the caller whose reservations these have to be ('': any)
--
-- What a job did not use comes back as if it had never been reserved. So it does not count for a bucket that has been
-- full since: that would grant the same minute twice. For this the buckets remember their highest levels.
local MINUTE_MS = 60000
local MAX_PEAKS = 32
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function level_of(buckets, name, limit)
  local found = redis.call('HMGET', buckets, name, name .. '_at')
  local elapsed_ms = math.max(0, now_ms - (tonumber(found[2]) or now_ms))
  return math.min(limit, (tonumber(found[1]) or limit) + elapsed_ms * limit / MINUTE_MS)
end

local function store(buckets, name, limit, level)
  redis.call('HSET', buckets, name, string.format('%.4f', level), name .. '_at', string.format('%.0f', now_ms),
    name .. '_limit', string.format('%.0f', limit))
  local full_ms = (limit - level) * MINUTE_MS / limit + 1000
  if redis.call('PTTL', buckets) < full_ms then -- a missing bucket is a full one
    redis.call('PEXPIRE', buckets, string.format('%.0f', full_ms))
  end
end

-- Return the peaks of the bucket of tokens as pairs of change and level. Levels fall from each to the next: the first
-- pair after a change has the highest level since then.
local function peaks_of(buckets)
  local peaks = {}
  for change, level in string.gmatch(redis.call('HGET', buckets, 'peaks') or '', '(%d+):(%-?[%d.]+)') do
    peaks[#peaks + 1] = { change = tonumber(change), level = tonumber(level) }
  end
  return peaks
end

-- Record the level of the bucket of tokens before a change. Returns the number of the change, higher than all before.
local function begin_change(buckets, level)
  local change = math.max(now_ms, (tonumber(redis.call('HGET', buckets, 'change')) or 0) + 1)
  local peaks, written = peaks_of(buckets), {}
  while peaks[1] and peaks[#peaks].level <= level do table.remove(peaks) end
  peaks[#peaks + 1] = { change = change, level = level }
  if #peaks > MAX_PEAKS then -- the second lasts as long as before, and counts as high as the first
    peaks[2].level = peaks[1].level
    table.remove(peaks, 1)
  end
  for i, peak in ipairs(peaks) do written[i] = string.format('%.0f:%.4f', peak.change, peak.level) end
  redis.call('HSET', buckets, 'change', string.format('%.0f', change), 'peaks', table.concat(written, ' '))
  return change
end

local function highest_since(buckets, change)
  for _, peak in ipairs(peaks_of(buckets)) do
    if peak.change > change then return peak.level end
  end
end

local function new_ones(reservations)
  local new = {}
  for _, reservation in ipairs(reservations) do
    if redis.call('EXISTS', reservation) == 0 then new[#new + 1] = reservation end
  end
  return new
end

local function reserve(buckets, reservations)
  local limits = { requests = tonumber(ARGV[2]), tokens = tonumber(ARGV[3]) }
  local new = new_ones(reservations)
  local each = math.min(tonumber(ARGV[4]), math.floor(limits.tokens / math.max(1, #new)))
  local costs = { requests = #new + tonumber(ARGV[5]), tokens = each * #new }
  local levels, left, wait_ms, short = {}, { requests = 0, tokens = 0 }, 0, ''
  for name, limit in pairs(limits) do
    if limit > 0 then
      levels[name] = level_of(buckets, name, limit)
      local missing_ms = (costs[name] - levels[name]) * MINUTE_MS / limit
      if missing_ms > wait_ms and (name == 'requests' or #new > 0) then wait_ms, short = missing_ms, name end
    end
  end
  local is_counted = costs.requests > 0
  local taken, change = is_counted and wait_ms == 0, 0
  for name, level in pairs(levels) do
    if taken then
      if name == 'tokens' then change = begin_change(buckets, level) end
      level = level - costs[name]
      store(buckets, name, limits[name], level)
    end
    left[name] = math.max(0, math.floor(level))
  end
  for _, reservation in ipairs(taken and new or {}) do
    local written = string.format('%.0f %.0f %.0f %s %s', each, limits.tokens, change, ARGV[7], buckets)
    redis.call('SET', reservation, written, 'PX', ARGV[6])
  end
  return { (is_counted and not taken) and 0 or 1, left.requests, left.tokens, math.ceil(wait_ms), short }
end

local function settle(reservation)
  local found = redis.call('GET', reservation) or ''
  local reserved, limit, change, mark, buckets = string.match(found, '^(%d+) (%d+) (%d+) (%S+) (.+)$')
  if not reserved or (ARGV[4] ~= '' and ARGV[4] ~= mark) then return end
  redis.call('DEL', reservation)
  if ARGV[3] ~= '0' then redis.call('SET', reservation, 'settled', 'PX', ARGV[3]) end
  limit = tonumber(redis.call('HGET', buckets, 'tokens_limit') or limit) -- the file of the keys may have changed
  if limit == 0 then return end
  local level = level_of(buckets, 'tokens', limit)
  begin_change(buckets, level)
  local free = limit - (highest_since(buckets, tonumber(change)) or limit)
  store(buckets, 'tokens', limit, level + math.min(tonumber(reserved) - tonumber(ARGV[2]), free))
end

if ARGV[1] == 'reserve' then return reserve(KEYS[1], { unpack(KEYS, 2) }) end
for _, reservation in ipairs(KEYS) do settle(reservation) end
