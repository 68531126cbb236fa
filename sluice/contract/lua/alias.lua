-- Set, move or remove an alias.
-- ARGV  alias, model ('': remove it), 1 if the model needs a live worker (else 0)
-- Returns 'done' and the model that it stood for before ('': none); or why it is refused: 'self', 'served' (live workers
-- serve the alias's name), 'alias' and a model (what is given as the model is an alias of that), 'target' and an alias (which
-- stands for this name), 'unserved', or 'full'.
local alias, model, now_ms = ARGV[1], ARGV[2], milliseconds()

if redis.call('TYPE', ALIASES).ok ~= 'hash' then redis.call('DEL', ALIASES) end -- a foreign value
local before = redis.call('HGET', ALIASES, alias)
if model == '' then
  redis.call('HDEL', ALIASES, alias)
  return { 'done', before or '' }
end
if alias == model then return { 'self', '' } end
if read_workers('sluice:model:' .. alias, now_ms) then return { 'served', '' } end
local behind = redis.call('HGET', ALIASES, model)
if behind then return { 'alias', behind } end
local all = redis.call('HGETALL', ALIASES)
for i = 1, #all, 2 do
  if all[i + 1] == alias then return { 'target', all[i] } end
end
if ARGV[3] == '1' and not read_workers('sluice:model:' .. model, now_ms) then return { 'unserved', '' } end
if not before and #all >= 2000 then return { 'full', '' } end -- workers read all of them twice a second
redis.call('HSET', ALIASES, alias, model)
redis.call('PUBLISH', 'sluice:wake:' .. model, '')
return { 'done', before or '' }
