-- What the workers of a model say to claims and submits: which prompts they hold, and how busy they are. All of it is a
-- hint, by which a job goes to the worker that is done with its prompt sooner: a wrong one costs time, and no answer.
--   sluice:fleet:<model>       a hash, by wid (six characters that a process draws): its record, numbers until, at, free,
--                              rows, gap, token (us), before (ns), tokens of 1,024 bytes, and four pairs of `lefts`
--   sluice:ready:<model>       a sorted set of wids, by when each is done with what it has
--   sluice:px:<model>:<mark>   ' wid wid ': workers that hold the beginning of a prompt up to this mark, the latest first;
--                              with a prefix cache per tenant sluice:px:<model>:<tenant>:<mark>
-- All times are milliseconds. scripts/simulation/choose.py is the same in Python, and a test holds the two equal.
--
-- A worker of the fleet: `wid`; `at`, when it said the rest; `free` rows of its `rows`; `gap`, the mean time between two
-- rows that come free; `token`, to compute a token at the beginning of a prompt, and `before`, that each token before it
-- adds; `per_byte`, tokens of a byte; 0 for what is not measured yet; `lefts`, by class: the time left of the prompts under way, and their number;
-- `promised` and `extra`: the jobs left to it in this claim, and the time of their prompts.
-- A job: `size`, the bytes that its marks are of; `names` and `ends` of its marks, ascending; `keys` of each, and `holders`, as in Redis.

local EDGES = { 250, 1000, 4000 } -- between the classes of prompts by what is left of them
local HOLDERS = 4                 -- workers compared for each job that hold more of its prompt
local MOST_NAMES = 16             -- read for that; some are of workers that have ended
local MOST_MARKS = 30             -- of a job: as many as its client makes, at most

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
  return first, first + 0.25 * longer_ms + longer * own + own + 150 * in_use
end

-- Return the bytes of a job that a worker holds.
local function held_by(job, wid)
  local name, holders = ' ' .. wid .. ' ', job.holders
  for at = #job.ends, 1, -1 do
    if holders[at] and string.find(holders[at], name, 1, true) then return job.ends[at] end
  end
  return 0
end

local function no_names() end

-- Find the workers that hold more than `held` of a job, the deepest first, and those with the least to do: `others` of
-- the job, each with the bytes that it holds and the time that it would compute. `fleet`: `worker`, a function that
-- returns a live worker by its wid, or nil; `least`. Returns the least time of those that hold something; nil if none does.
local function find_others(fleet, job, held, wid)
  local found, holders, names, elsewhere = { [wid] = true }, 0, 0, nil
  job.others = {}
  local function add(worker)
    if not worker or found[worker.wid] then return 0 end
    found[worker.wid] = true
    local its = held_by(job, worker.wid)
    local own = compute_ms(worker, its, job.size)
    job.others[#job.others + 1] = { worker = worker, own = own, held = its }
    if its > 0 then elsewhere = math.min(elsewhere or math.huge, own) end
    return 1
  end
  for at = #job.ends, 1, -1 do
    if job.ends[at] <= held or holders >= HOLDERS or names >= MOST_NAMES then break end
    local value = job.holders[at]
    for name in value and string.gmatch(value, '%S+') or no_names do
      if holders >= HOLDERS or names >= MOST_NAMES then break end
      names = names + 1
      if name ~= wid then holders = holders + add(fleet.worker(name)) end
    end
  end
  for _, worker in ipairs(fleet.least) do add(worker) end
  return elsewhere
end

-- Read the marks of a job, 'mark end mark end ...' and the bytes that they are of, which any client may have written.
local function read_marks(job, marks, bytes, prompt_cache_key)
  job.names, job.ends, job.holders = {}, {}, {}
  job.size = tonumber(string.match(bytes or '', '^%d%d?%d?%d?%d?%d?%d?%d?%d?$') or 0)
  if prompt_cache_key and #prompt_cache_key <= 1024 then -- its jobs likely begin alike, but nobody knows how far
    job.names[1] = string.sub(redis.sha1hex('prompt_cache_key ' .. prompt_cache_key), 1, 12)
    job.ends[1] = math.min(1024, job.size)
  end
  if #(marks or '') > 1000 then return end
  local names, ends, size, count, least = job.names, job.ends, job.size, #job.names, 0
  for mark, bytes_to_it in string.gmatch(marks or '', '(%x+) (%d+)') do
    local at = tonumber(bytes_to_it)
    if count >= MOST_MARKS or #mark > 12 or at <= least or at > size then break end
    count = count + 1
    names[count], ends[count], least = mark, at, at
  end
end

local function model_of(queue)
  return string.match(queue, '^sluice:queue:(.*):')
end

-- Return the key of a mark. `tenant`: nil if tenants share the prefix caches.
local function mark_key(model, tenant, mark)
  return 'sluice:px:' .. model .. ':' .. (tenant and tenant .. ':' or '') .. mark
end

-- Read who holds what of a job. A value that no worker writes counts as none, and is overwritten.
local function read_holders(job, model, tenant)
  job.keys = {}
  if #job.names == 0 then return end
  local prefix = mark_key(model, tenant, '')
  for at, mark in ipairs(job.names) do job.keys[at] = prefix .. mark end
  local held = redis.pcall('MGET', unpack(job.keys))
  job.holders = {}
  if held.err then return end
  for at, value in ipairs(held) do
    job.holders[at] = value and #value <= 1000 and string.byte(value) == 32 and value
  end
end

-- Let a worker that has measured nothing yet count as fast as another.
local function assume(worker, other)
  if worker.token == 0 then worker.token, worker.before = other.token, other.before end
  if worker.per_byte == 0 then worker.per_byte = other.per_byte end
end

-- Let a worker count a text as another does: its tokens are the same, whatever texts each has measured.
local function agree(worker, known)
  assume(worker, known)
  worker.per_byte = known.per_byte
end

-- Return the live workers of a model as `find_others` takes them. `me`: a worker that is none of `least`, or nil. Workers
-- whose lease has expired are forgotten.
local function read_fleet(model, now, me)
  local records, ready, workers = 'sluice:fleet:' .. model, 'sluice:ready:' .. model, {}
  local wid, known = me and me.wid or '', nil
  local function worker(name)
    if workers[name] == nil then
      local text = redis.pcall('HGET', records, name)
      workers[name] = type(text) == 'string' and read_worker(name, text, now) or false
      if known and workers[name] then agree(workers[name], known) end
      if type(text) == 'string' and not workers[name] then redis.pcall('HDEL', records, name) end
    end
    return workers[name]
  end
  local fleet = { worker = worker, least = {}, now = now }
  local names = redis.pcall('ZRANGE', ready, 0, 3)
  for _, name in ipairs(names.err and {} or names) do
    local its = name ~= wid and worker(name)
    if its and #fleet.least < 2 then fleet.least[#fleet.least + 1] = its end
    if its == false and name ~= wid then redis.pcall('ZREM', ready, name) end
  end
  known = { token = 0, before = 0, per_byte = 0 }
  if me then assume(known, me) end
  for _, worker in ipairs(fleet.least) do assume(known, worker) end
  assume(known, { token = 0.5, before = 0, per_byte = 0.25 }) -- a small model on a laptop; four bytes a token
  if me then assume(me, known) end
  for _, each in pairs(workers) do if each then agree(each, known) end end
  return fleet
end
