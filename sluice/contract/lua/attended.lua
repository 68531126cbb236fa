-- Check if a worker attends to a job: end the job if its deadline has passed and no worker has it.
-- ARGV  id, life_ms, log_ttl_ms, result_ttl_ms
-- Returns the job's state or nil; the number of its attempt; the number of live workers of its model: at least the
-- one that has its lease, which may be draining; -1 if its state names no model; and of a model that is loaded for it,
-- the bytes that are loaded, and all: of the load that has come furthest. 0 and 0 if there is none.
local id, lives = ARGV[1], { job = ARGV[2], log = ARGV[3], result = ARGV[4] }
local fields = redis.pcall('HMGET', 'sluice:job:' .. id, 'state', 'model', 'lane', 'deadline', 'attempt')
if fields.err then fields = {} end
local state, model, lane, now_ms = fields[1], fields[2], fields[3], milliseconds()

local function live_workers()
  local reports, alive, loaded, weights = redis.pcall('HVALS', 'sluice:model:' .. model), 0, 0, 0
  if reports.err then return 0, 0, 0 end -- a foreign value
  for _, report in ipairs(reports) do
    local valid_until = tonumber(string.match(report, '^%d+ [%d.]+ (%d+)') or '')
    if valid_until and valid_until * 1000 > now_ms then
      alive = alive + 1
      local done, all = string.match(report, '^%S+ %S+ %S+ %S+ %S+ (%d+) (%d+)$')
      done, all = tonumber(done), tonumber(all)
      if all and all < 2 ^ 53 and done <= all and done * weights >= loaded * all then loaded, weights = done, all end
    end
  end
  return alive, loaded, weights
end

-- A deadline counts as in the claim of a worker. A live worker's lease wins: it ends its job itself.
local deadline = tonumber(fields[4] or '')
if deadline and deadline * 1000 < now_ms and not FINAL[state] and not has_lease(id) then
  local queue = queue_of_job(id, {}, model, lane)
  if queue then
    state = 'failed'
    end_without_worker(id, queue, state, '"error":{"type":"deadline","message":' ..
      '"The job\'s deadline passed while it waited in the queue.","retryable":true}', lives)
  end
end
local alive, loaded, weights = -1, 0, 0
if model then alive, loaded, weights = live_workers() end
if has_lease(id) then alive, loaded, weights = alive == 0 and 1 or alive, 0, 0 end
return { state, tonumber(fields[5] or 0) or 0, alive, loaded, weights }
