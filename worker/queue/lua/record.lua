-- Publish the record of a worker for the claims of the others, and delete those of workers that died. A full server
-- forgets marks, and refuses the record, which the next call repeats.
-- KEYS  fleet, ready (of the model: see sluice/contract/keys.py)
-- ARGV  by name: worker (its id), record ('': none, the worker leaves), ready_ms, lease_ms, prefix (of the keys of
--       marks); lists: gone (ids of this worker whose records to delete), forgotten (marks that it holds no more)
local arguments = read_arguments({ gone = true, forgotten = true })
local fleet, ready, lease_ms = KEYS[1], KEYS[2], tonumber(arguments.lease_ms)

-- Write unless the server is full.
local function write(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err and not string.find(reply.err, '^OOM') then error(reply) end
end

for key, kind in pairs({ [fleet] = 'hash', [ready] = 'zset' }) do
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end -- another program wrote it
end
-- A mark that thousands of workers hold has a value that no worker writes.
local MOST = 8192
for _, mark in ipairs(arguments.forgotten) do
  local key = arguments.prefix .. mark
  local length = redis.pcall('STRLEN', key)
  local held = type(length) == 'number' and length <= MOST and redis.call('GET', key)
  local from, to
  if held then from, to =  string.find(held, ' ' .. arguments.worker .. ' ', 1, true) end
  if from then
    local left = string.sub(held, 1, from) .. string.sub(held, to + 1)
    if string.find(left, '%S') then write('SET', key, left, 'KEEPTTL') else redis.call('DEL', key) end
  end
end

-- A worker is ready at the time of its last record or later.
local dead = redis.call('ZRANGE', ready, '-inf', milliseconds() - lease_ms, 'BYSCORE', 'LIMIT', 0, 100)
for _, ids in ipairs({ dead, arguments.gone }) do
  for _, id in ipairs(ids) do
    redis.call('HDEL', fleet, id)
    redis.call('ZREM', ready, id)
  end
end
if arguments.record ~= '' then
  write('HSET', fleet, arguments.worker, arguments.record)
  write('ZADD', ready, arguments.ready_ms, arguments.worker)
  redis.call('PEXPIRE', fleet, lease_ms)
  redis.call('PEXPIRE', ready, lease_ms)
end
