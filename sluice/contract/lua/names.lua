-- The names of models: which have live workers, and which are aliases.
local ALIASES = 'sluice:aliases' -- hash: the model that an alias stands for, by the name of the alias

-- Return the queue limit of the live workers of a model (nil: there is none), and the jobs that they end in a second.
-- `workers`: a hash in which each of them keeps a field: 'limit jobs_per_s valid_until ...'.
local function read_workers(workers, now_ms)
  local reports, limit, rate = redis.pcall('HVALS', workers), nil, 0
  if reports.err then
    redis.call('DEL', workers) -- a foreign value; the workers write theirs again
    reports = {}
  end
  for _, text in ipairs(reports) do
    local worker_limit, worker_rate, valid_until = string.match(text, '^(%d+) ([%d.]+) (%d+)')
    if worker_limit and tonumber(worker_rate) and tonumber(valid_until) * 1000 > now_ms then
      limit = math.min(limit or math.huge, tonumber(worker_limit))
      rate = rate + tonumber(worker_rate)
    end
  end
  return limit, rate
end

local function is_model_name(text)
  return type(text) == 'string' and #text <= 64 and string.match(text, '^%w[%w._-]*$') ~= nil
end

-- Return the model that an alias stands for; nil for any other name, and if another program wrote what is stored.
local function model_of_alias(name)
  local model = redis.pcall('HGET', ALIASES, name) -- an error if it is no hash, or if the user may not read it
  return is_model_name(model) and model ~= name and model or nil
end
