-- Choose which waiting jobs this worker takes, and which it leaves to others that would be done with them sooner, by
-- what the workers say: see sluice/contract/lua/fleet.lua.
--
-- The state of a choice is that of a fleet, and: `me`; `want`, rows; `next_job`, a function that returns the next waiting
-- job, with `queued`, `deadline` or nil, and `may_be_left`; `in_turn`, a function that returns the position of the job whose turn it is, of a
-- list; `leaves`: false if no job is left to a better worker, and each may be kept for others; `is_kept`, a function that
-- is called with a job that nobody holds anything of and the number of jobs taken: true if others take it; `take`, `leave` and `keep`, functions that are called with each job.

local SCAN = 16          -- jobs that are ranked at a time
local MOST_SCANNED = 256 -- in one claim: a row stays idle beside jobs that are better done elsewhere
local MARGIN = 50        -- a difference of less is none

-- Add to a job what it would cost whom: `held` bytes and `own` time here, `others`, `known` if somebody holds something
-- of it, and its `rank`: it overtakes by what is saved here and not elsewhere.
local function look(choice, job)
  local me = choice.me
  job.held = held_by(job, me.wid)
  job.own = compute_ms(me, job.held, job.size)
  local elsewhere = find_others(choice, job, job.held, me.wid)
  job.known = job.held > 0 or elsewhere ~= nil
  elsewhere = elsewhere or compute_ms(me, 0, job.size)
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
      if job.deadline then till = math.min(till, job.queued + 0.1 * (job.deadline - job.queued)) end -- the rest is to answer
    end
  end
  return best, till
end

-- Count a job that a worker takes.
local function add_work(worker, own)
  local place = class_of(own)
  worker.free = worker.free - 1
  worker.lefts[place] = worker.lefts[place] + own
  worker.lefts[place + 1] = worker.lefts[place + 1] + 1
end

-- Take, leave and keep waiting jobs until all rows are taken. `take` is called with true too if another worker is better,
-- but its time is over. Returns nil if nobody holds anything of the first jobs, so that they can be taken in their order;
-- else the time until a job that was left may be taken here.
local function choose(choice)
  local window, any, taken, again = {}, false, 0, math.huge
  choice.scanned = 0
  local function fill()
    while #window < SCAN and choice.scanned < MOST_SCANNED do
      local job = choice.next_job()
      if not job then break end
      choice.scanned = choice.scanned + 1
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
    if choice.leaves and job.may_be_left then best, till = better(choice, job) end
    if best and choice.now < till then
      best.worker.promised, best.worker.extra = best.worker.promised + 1, best.worker.extra + best.own
      again = math.min(again, math.max(20, math.ceil(till - choice.now))) -- many that differ by 1 ms are no 1,000 claims/s
      choice.leave(job, best)
    elseif job.may_be_left and not (choice.leaves and job.known) and choice.is_kept(job, taken) then
      choice.keep(job)
    else
      add_work(choice.me, job.own)
      taken = taken + 1
      choice.take(job, best ~= nil)
    end
    fill()
  end
  return again
end
