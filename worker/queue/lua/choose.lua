-- Choose which waiting jobs this worker takes, and which it leaves to others that would be done with them sooner.
-- scripts/simulation/choose.py is the same in Python, and a test holds the two equal. All times are milliseconds.
--
-- A worker of the fleet: `wid`; `at`, when it said the rest; `free` rows of its `rows`; `gap`, the mean time between two
-- rows that come free; `token`, to compute a token at the beginning of a prompt, and `before`, that each token before it
-- adds; `per_byte`, tokens of a byte; `lefts`, by class: the time left of the prompts under way, and their number;
-- `promised` and `extra`: the jobs left to it in this claim, and the time of their prompts.
-- A job: `queued`; `size`, the bytes that its marks are of; `ends` of its marks, ascending; `holders` of each, as
-- ' wid wid ' or false; `may_be_left`.
--
-- The state of a choice: `me`; `worker`, a function that returns a live worker by its wid; `least`, two others with the
-- least to do; `now`; `want`, rows; `share`: of jobs that nobody holds anything of, none is taken once as many as this
-- are; `next_job`, a function that returns the next waiting job; `in_turn`, a function that returns the position of the
-- job whose turn it is, of a list; `take` and `leave`, functions that are called with each job and the worker that is better.

local EDGES = { 250, 1000, 4000 } -- between the classes of prompts by what is left of them
local SCAN = 16                   -- jobs that are ranked at a time
local MOST_SCANNED = 256          -- in one claim: a row stays idle beside jobs that are better done elsewhere
local HOLDERS = 4                 -- workers compared for each job that hold more of its prompt
local MOST_NAMES = 16             -- read for that; some are of workers that have ended
local MARGIN = 50                 -- a difference of less is none

-- Return a worker by its record; nil if its lease has expired, or the record is another program's.
local function read_worker(wid, text, now)
  if #text > 400 or string.find(text, '[^%d%. ]') then return nil end
  local n = {}
  for word in string.gmatch(text, '%S+') do
    local number = tonumber(word)
    if not number or number > 1e15 then return nil end
    n[#n + 1] = number
  end
  if #n < 16 or n[1] <= now then return nil end
  return { wid = wid, at = n[2], free = n[3], rows = n[4], gap = n[5], token = n[6] / 1000, before = n[7] / 1e6,
    per_byte = n[8] / 1024, lefts = { unpack(n, 9, 16) }, promised = 0, extra = 0 }
end

-- Return the time to compute a prompt of `size` bytes of which the worker holds `held`.
local function compute_ms(worker, held, size)
  local done, tokens = held * worker.per_byte, size * worker.per_byte
  return (tokens - done) * worker.token + (tokens * tokens - done * done) / 2 * worker.before
end

-- Return the place of a prompt's class in `lefts`.
local function class_of(own)
  local place = 1
  while place <= #EDGES and own >= EDGES[place] do place = place + 1 end
  return 2 * place - 1
end

-- Return the time to the first token of a prompt that computes for `own` here, and that with what it costs the other
-- prompts of the worker.
local function cost_ms(worker, own, now)
  local free = worker.free - worker.promised
  local first, longer_ms, longer, place = free > 0 and 0 or worker.gap * (1 - free), 0, 0, class_of(own)
  local gone = math.max(0, now - worker.at)
  first = first + worker.extra
  for at = 1, 7, 2 do
    local was = worker.lefts[at]
    local left = math.max(0, was - gone)
    gone = math.max(0, gone - was)
    local share = at == place and 0.5 or (at < place and 1 or 0) -- half of its own class is shorter
    first = first + share * left
    longer_ms = longer_ms + (1 - share) * left
    if left > 0 then longer = longer + (1 - share) * worker.lefts[at + 1] end
  end
  first = first + own * (longer > 0 and 4 / 3 or 1) -- each fourth step is the oldest prompt's
  local in_use = worker.rows - math.max(0, free)
  -- What a prompt overtakes, what waits for it, what it displaces, and the rows that decode beside it.
  return first, first + 0.25 * longer_ms + 0.5 * longer * own + 0.5 * own + 150 * in_use
end

-- Return the bytes of a job that a worker holds.
local function held_by(job, wid)
  local name = ' ' .. wid .. ' '
  for at = #job.ends, 1, -1 do
    if job.holders[at] and string.find(job.holders[at], name, 1, true) then return job.ends[at] end
  end
  return 0
end

-- Add to a job what it would cost whom: `held` bytes and `own` time here, `others`, `known` if somebody holds something
-- of it, and its `rank`: it overtakes by what is saved here and not elsewhere.
local function look(choice, job)
  local me = choice.me
  job.held, job.others = held_by(job, me.wid), {}
  job.own, job.known = compute_ms(me, job.held, job.size), job.held > 0
  local elsewhere, found, holders, names = math.huge, { [me.wid] = true }, 0, 0
  local function add(worker)
    if not worker or found[worker.wid] then return 0 end
    found[worker.wid] = true
    local held = held_by(job, worker.wid)
    local own = compute_ms(worker, held, job.size)
    job.others[#job.others + 1] = { worker = worker, own = own }
    if held > 0 then elsewhere, job.known = math.min(elsewhere, own), true end
    return 1
  end
  for at = #job.ends, 1, -1 do
    if job.ends[at] <= job.held then break end
    for wid in string.gmatch(job.holders[at] or '', '%S+') do
      if holders >= HOLDERS or names >= MOST_NAMES then break end
      names = names + 1
      if wid ~= me.wid then holders = holders + add(choice.worker(wid)) end
    end
  end
  for _, worker in ipairs(choice.least) do add(worker) end
  if elsewhere == math.huge then elsewhere = compute_ms(me, 0, job.size) end
  job.rank = job.queued - math.max(-30000, math.min(30000, 3 * (elsewhere - job.own)))
end

-- Return the worker that would be done with a job sooner, as in `others`, and until when the job is left to it; nil if
-- there is none.
local function better(choice, job)
  local first, all = cost_ms(choice.me, job.own, choice.now)
  local best, best_all, till = nil, all - MARGIN, 0
  for _, other in ipairs(job.others) do
    local its_first, its_all = cost_ms(other.worker, other.own, choice.now)
    if its_all < best_all then
      best, best_all = other, its_all
      till = job.queued + math.min(120000, math.max(first - its_first, job.own - other.own))
    end
  end
  return best, till
end

-- Take and leave waiting jobs until all rows are taken. Returns nil if nobody holds anything of the first of them, so
-- that they can be taken in today's order; else: `again`, the time until a job that was left may be taken here, `kept`,
-- `overruled` (jobs taken although another is better: its time is over), and `scanned`, numbers.
local function choose(choice)
  local window, any, taken = {}, false, 0
  local chosen = { again = math.huge, kept = 0, overruled = 0, scanned = 0 }
  local function fill()
    while #window < SCAN and chosen.scanned < MOST_SCANNED do
      local job = choice.next_job()
      if not job then break end
      chosen.scanned = chosen.scanned + 1
      look(choice, job)
      any = any or job.known
      window[#window + 1] = job
    end
  end
  fill()
  if not any then return nil end
  while taken < choice.want and #window > 0 do
    local job = table.remove(window, choice.in_turn(window))
    local best, till
    if job.may_be_left then best, till = better(choice, job) end
    if best and choice.now < till then
      best.worker.promised, best.worker.extra = best.worker.promised + 1, best.worker.extra + best.own
      chosen.again = math.min(chosen.again, math.ceil(till - choice.now))
      choice.leave(job, best.worker)
    elseif not job.known and job.may_be_left and taken >= choice.share then
      chosen.kept = chosen.kept + 1
    else
      local place = class_of(job.own)
      choice.me.free = choice.me.free - 1
      choice.me.lefts[place] = choice.me.lefts[place] + job.own
      choice.me.lefts[place + 1] = choice.me.lefts[place + 1] + 1
      if best then chosen.overruled = chosen.overruled + 1 end
      taken = taken + 1
      choice.take(job)
    end
    fill()
  end
  return chosen
end
