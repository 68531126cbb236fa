-- Return the jobs that are due since a score, with their bodies, in one step: a worker that refuses a job deletes its body
-- within a few milliseconds. Reads at most 16 jobs of a queue, and 16 MB of bodies.
-- KEYS  queues
-- ARGV  the least score, and the ids of jobs that are known
-- Returns for each job the index of its queue, its id, score and body, and its tenant or ''
local found, left, known = {}, 16000000, {}
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
for i = 2, #ARGV do known[ARGV[i]] = true end
for at, queue in ipairs(KEYS) do
  local page = redis.pcall('ZRANGEBYSCORE', queue, ARGV[1], now_ms, 'WITHSCORES', 'LIMIT', 0, 16)
  for i = 1, #page, 2 do
    local body = 'arq:job:' .. page[i]
    local bytes = redis.pcall('STRLEN', body) -- an error of a foreign value is a table, as in the next lines
    local tenant = redis.pcall('HGET', 'sluice:job:' .. page[i], 'tenant')
    if type(bytes) == 'number' and bytes <= left and not known[page[i]] then
      left = left - bytes
      found[#found + 1] = { at, page[i], page[i + 1], redis.call('GET', body) or '', type(tenant) == 'string' and tenant or '' }
    end
  end
end
return found
