-- Move jobs that plain producers queued under an alias of this model into its queues, at most PAGE, and wake its workers.
-- ARGV  model, life_ms, takeover (1 if jobs whose lease has expired may be moved)
-- Returns the number of jobs that were moved.
--
-- Under an alias's name live workers may serve a model of their own: then its queues are theirs. A job that runs stays.
-- One of our submit, which waited for a model before its name became an alias, takes the new model.
local model, life_ms, takeover = ARGV[1], ARGV[2], ARGV[3] == '1'
local PAGE = 500 -- about 3 ms
local moved, now_ms = 0, milliseconds()

local function may_move(id)
  if redis.call('EXISTS', 'arq:in-progress:' .. id) == 1 then return false end
  return takeover or redis.pcall('HGET', 'sluice:job:' .. id, 'state') ~= 'running'
end

-- Note the alias with the job: its body may name it as its model. An id beyond 128 characters ends at its claim.
local function note_alias(id, alias)
  local job = 'sluice:job:' .. id
  local before = redis.pcall('HGET', job, 'model')
  if type(before) == 'table' or #id > 128 then return end -- a foreign value, which the claim deletes
  redis.call('HSET', job, 'alias', alias)
  if before then redis.call('HSET', job, 'model', model) end
  if redis.call('PTTL', job) < 0 then redis.call('PEXPIRE', job, life_ms) end
end

local function move_all(alias, lane)
  local from = 'sluice:queue:' .. alias .. ':' .. lane
  local to = 'sluice:queue:' .. model .. ':' .. lane
  if redis.call('TYPE', from).ok ~= 'zset' then return end
  local due = redis.call('ZRANGEBYSCORE', from, '-inf', now_ms, 'WITHSCORES', 'LIMIT', 0, PAGE - moved)
  for i = 1, #due, 2 do
    local id, score = due[i], due[i + 1]
    if may_move(id) then
      redis.call('ZREM', from, id)
      in_index(remove_from_index, index_of(from), id)
      redis.call('ZADD', to, 'NX', score, id)
      note_alias(id, alias)
      moved = moved + 1
    end
  end
end

local all = redis.pcall('HGETALL', ALIASES)
if all.err then return 0 end -- a foreign value
for i = 1, #all, 2 do
  if all[i + 1] == model and all[i] ~= model and is_model_name(all[i]) and not read_workers('sluice:model:' .. all[i], now_ms) then
    for _, lane in ipairs({ 'interactive', 'batch' }) do move_all(all[i], lane) end
  end
end
if moved > 0 then redis.call('PUBLISH', 'sluice:wake:' .. model, '') end
return moved
