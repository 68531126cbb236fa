-- The limits of one key, as two buckets that refill within a minute: requests and tokens.
-- take: count one request and reserve tokens, unless that is more than the buckets hold. A job is counted once, however
--       often it is taken; without a job the buckets are only read.
--   KEYS  buckets, reservation
--   ARGV  'take', 1 if there is a job (else 0), requests a minute (0: no limit), tokens a minute (0: no limit), tokens,
--         life_ms of the reservation
--   Returns 1 or 0 (refused), requests left, tokens left, milliseconds until it would fit, 'requests' or 'tokens'
-- settle: replace a reservation by the tokens that were used. Has no effect the second time.
--   KEYS  reservation
--   ARGV  'settle', tokens, life_ms of the mark that it is settled; 0 leaves no mark, so the job can be taken again
local MINUTE_MS = 60000
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function level_of(buckets, name, limit)
  local found = redis.call('HMGET', buckets, name, name .. '_at')
  local elapsed_ms = math.max(0, now_ms - (tonumber(found[2]) or now_ms))
  return math.min(limit, (tonumber(found[1]) or limit) + elapsed_ms * limit / MINUTE_MS)
end

local function store(buckets, name, limit, level)
  redis.call('HSET', buckets, name, string.format('%.4f', level), name .. '_at', string.format('%.0f', now_ms))
  local full_ms = (limit - level) * MINUTE_MS / limit + 1000
  if redis.call('PTTL', buckets) < full_ms then -- a missing bucket is a full one
    redis.call('PEXPIRE', buckets, string.format('%.0f', full_ms))
  end
end

local function take(buckets, reservation)
  local limits = { requests = tonumber(ARGV[3]), tokens = tonumber(ARGV[4]) }
  local costs = { requests = 1, tokens = math.min(tonumber(ARGV[5]), limits.tokens) }
  local levels, left, wait_ms, short = {}, { requests = 0, tokens = 0 }, 0, ''
  for name, limit in pairs(limits) do
    if limit > 0 then
      levels[name] = level_of(buckets, name, limit)
      local missing_ms = (costs[name] - levels[name]) * MINUTE_MS / limit
      if missing_ms > wait_ms then wait_ms, short = missing_ms, name end
    end
  end
  local is_new = ARGV[2] == '1' and redis.call('EXISTS', reservation) == 0
  local taken = is_new and wait_ms == 0
  for name, level in pairs(levels) do
    if taken then
      level = level - costs[name]
      store(buckets, name, limits[name], level)
    end
    left[name] = math.max(0, math.floor(level))
  end
  if taken then
    redis.call('SET', reservation, string.format('%.0f %.0f %s', costs.tokens, limits.tokens, buckets), 'PX', ARGV[6])
  end
  return { (is_new and not taken) and 0 or 1, left.requests, left.tokens, math.ceil(wait_ms), short }
end

local function settle(reservation)
  local reserved, limit, buckets = string.match(redis.call('GET', reservation) or '', '^(%d+) (%d+) (.+)$')
  if not reserved then return 0 end
  redis.call('DEL', reservation)
  if ARGV[3] ~= '0' then redis.call('SET', reservation, 'settled', 'PX', ARGV[3]) end
  limit = tonumber(limit)
  if limit > 0 then
    local level = level_of(buckets, 'tokens', limit) + tonumber(reserved) - tonumber(ARGV[2])
    store(buckets, 'tokens', limit, math.min(limit, level))
  end
  return 1
end

if ARGV[1] == 'take' then return take(KEYS[1], KEYS[2]) end
return settle(KEYS[1])
