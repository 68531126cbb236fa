-- Share waiting jobs among the live workers of a model, so that the first of them does not claim a whole burst.
--
-- The workers of a model store their rows in a hash, by name: 'at until rows max_rows interactive batch step_us ...'.
-- These are the times, in Unix milliseconds, of the worker's last claim and until which it counts as alive; the rows in
-- use, and all rows; the rows that each lane may still take; and the microseconds of its shortest decode steps of 1 row, 2
-- to 3, 4 to 7 and so on, 0 if unknown. They are hints: if they are missing or wrong, a job begins milliseconds later, or on a busier worker.
--
-- The state of a fleet: `key` of the hash; `worker`: the name of this worker; `mine`: its rows, nil if it shares with no
-- other; `others`: the rows of the others; `lane`; `now`; `lease_ms`.

-- Steps are measured on machines that have other work too, so workers that are less than 1.5 times faster or slower
-- count as equal. None counts as more than 8 times faster: an M3 Ultra has 7 times the memory bandwidth of an M4.
local EQUAL_SPEED, MOST_SPEED = 1.5, 8

-- `steps`: the times of the steps, as text.
local function worker_rows(rows, max_rows, interactive, batch, steps)
  return { rows = tonumber(rows), max_rows = tonumber(max_rows), interactive = tonumber(interactive),
    batch = tonumber(batch), steps = steps }
end

local function rows_key(queue)
  return 'sluice:model:' .. string.match(queue, '^sluice:queue:(.*):') .. ':rows'
end

-- Return the state of the fleet without the others, which are read when they are needed.
local function fleet_of(queue, arguments, now)
  local rows = arguments.worker_rows
  return {
    key = rows_key(queue), worker = arguments.worker, lane = arguments.lane, now = now,
    lease_ms = tonumber(arguments.lease_ms),
    mine = rows[4] and worker_rows(rows[1], rows[2], rows[3], rows[4], table.concat(rows, ' ', 5)) or nil, others = {}
  }
end

-- Return the rows in a field of the hash; nil if no worker wrote it.
local function read_rows(text)
  if #text > 300 or string.find(text, '[^%d ]') then return nil end
  local at, till, rows, max_rows, interactive, batch, steps = string.match(text,
    '^ *(%d+) +(%d+) +(%d+) +(%d+) +(%d+) +(%d+)(.*)$')
  if not at then return nil end
  local read = worker_rows(rows, max_rows, interactive, batch, string.match(steps, '^ *(.*)$'))
  read.at, read.till = tonumber(at), tonumber(till)
  return read
end

local function store(key, worker, numbers)
  local text = string.format('%.0f %.0f %.0f %.0f %.0f %.0f ', numbers.at, numbers.till, numbers.rows, numbers.max_rows,
    numbers.interactive, numbers.batch)
  redis.call('HSET', key, worker, text .. numbers.steps)
end

-- Count jobs that a worker has claimed. Offline rows can be preempted, but an interactive job begins sooner without.
local function add_rows(numbers, jobs)
  numbers.rows = math.max(0, numbers.rows + jobs)
  numbers.interactive, numbers.batch = math.max(0, numbers.interactive - jobs), math.max(0, numbers.batch - jobs)
end

-- Count a job of this queue that has ended on a worker, before the worker's next claim does.
local function count_ended(queue, worker)
  local key = rows_key(queue)
  local text = redis.pcall('HGET', key, worker)
  local numbers = type(text) == 'string' and read_rows(text)
  if not numbers then return end
  add_rows(numbers, -1)
  store(key, worker, numbers)
end

-- Read the rows of the other live workers that may take jobs of this lane, and forget the dead.
local function read_others(fleet)
  if not fleet.mine then return end
  local all = redis.pcall('HGETALL', fleet.key)
  if all.err then
    delete_foreign(fleet.key, 'no hash')
    return
  end
  for i = 1, #all, 2 do
    local other = read_rows(all[i + 1])
    if not other or other.till < fleet.now then
      redis.call('HDEL', fleet.key, all[i])
    elseif all[i] ~= fleet.worker and other[fleet.lane] > 0 then
      other.name = all[i]
      fleet.others[#fleet.others + 1] = other
    end
  end
end

local function store_rows(fleet)
  if not fleet.mine then return end
  fleet.mine.at, fleet.mine.till = fleet.now, fleet.now + fleet.lease_ms
  store(fleet.key, fleet.worker, fleet.mine)
  redis.call('PEXPIRE', fleet.key, fleet.lease_ms)
end

local function count_claimed(fleet, jobs)
  if fleet.mine then add_rows(fleet.mine, jobs) end
end

-- Forget the workers that have claimed nothing since `at`, although jobs were left to them then: they are dead, hang, or
-- are slow at present. Each is known again after its next claim. If there are none, the workers disagree on whose turn it
-- is, so this one shares with no other.
local function forget_late(fleet, at)
  local in_time = {}
  for _, other in ipairs(fleet.others) do
    if other.at > at then
      in_time[#in_time + 1] = other
    else
      redis.call('HDEL', fleet.key, other.name)
    end
  end
  fleet.others = #in_time < #fleet.others and in_time or {}
end

-- Return the times of the steps as numbers.
local function steps_of(numbers)
  local times = {}
  for us in string.gmatch(numbers.steps, '%d+') do times[#times + 1] = tonumber(us) end
  return times
end

-- Return how many times faster the other worker is, by the steps of as many rows that both have measured.
local function speed_of(other, mine)
  local own_us, other_us = 0, 0
  mine.step_us = mine.step_us or steps_of(mine)
  local its = steps_of(other)
  for place, us in ipairs(mine.step_us) do
    local its_us = its[place] or 0
    if us > 0 and its_us > 0 then own_us, other_us = own_us + us, other_us + its_us end
  end
  if own_us == 0 then return 1 end
  local speed = math.min(math.max(own_us / other_us, 1 / MOST_SPEED), MOST_SPEED)
  return speed < EQUAL_SPEED and speed > 1 / EQUAL_SPEED and 1 or speed
end

-- Return how many of `waiting` jobs this worker takes if it has `free` rows. Each job goes to the worker that would then
-- have the smallest part of its rows in use, in proportion to its speed, and rather to this one than to an equal one: so
-- one of the workers takes the next job at once.
local function share_of(fleet, waiting, free)
  if #fleet.others == 0 then return free end
  local mine, share = fleet.mine, 0
  while share < math.min(free, waiting) do
    local before = 0 -- jobs that go to others before the next one of ours
    for _, other in ipairs(fleet.others) do
      other.speed = other.speed or speed_of(other, mine)
      local rows = (mine.rows + share + 1) * other.max_rows * other.speed / mine.max_rows
      before = before + math.min(other[fleet.lane], math.max(0, math.ceil(rows - 1e-9) - 1 - other.rows))
      if share + before >= waiting then break end
    end
    if share + before >= waiting then break end
    share = share + 1
  end
  return share
end
