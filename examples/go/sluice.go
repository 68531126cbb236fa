package main

// A producer for Sluice in plain Redis commands, as docs/contract.md describes them.

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
)

const (
	bodyLifeMs = "86400000"
	silence    = time.Second      // read the list again after this long without a message
	unknown    = 10 * time.Second // a job without a trace for this long does not exist
	outage     = 60 * time.Second
)

var errUnknownJob = errors.New("no such job, or its events have expired")

// Event of a job. JSON is the object as the worker wrote it; the other fields are those that the example uses.
type Event struct {
	JSON    string `json:"-"`
	Seq     int    `json:"seq"`
	Type    string `json:"type"`
	Content string `json:"content"`
	Reason  string `json:"reason"`
	Error   struct {
		Type    string `json:"type"`
		Message string `json:"message"`
	} `json:"error"`
}

// Final reports whether nothing comes after the event.
func (e Event) Final() bool {
	return e.Type == "finished" || e.Type == "failed" || e.Type == "cancelled"
}

// Submit queues a chat, the body of an OpenAI chat completion, and returns the job's id. An id can be used once.
func Submit(redis *connection, request json.RawMessage, model, lane string) (string, error) {
	id := newID()
	known, err := redis.command("EXISTS", "arq:job:"+id, "sluice:job:"+id)
	if err != nil {
		return "", err
	}
	if known != int64(0) {
		return "", fmt.Errorf("job %s exists already", id)
	}
	now, err := serverTime(redis)
	if err != nil {
		return "", err
	}
	body, err := json.Marshal(map[string]any{
		"t": nil, "f": "chat", "a": []json.RawMessage{request}, "k": struct{}{}, "et": now,
	})
	if err != nil {
		return "", err
	}
	replies, err := redis.pipeline([][]string{
		{"MULTI"},
		{"SET", "arq:job:" + id, string(body), "PX", bodyLifeMs},
		{"ZADD", "sluice:queue:" + model + ":" + lane, strconv.FormatInt(now, 10), id},
		{"PUBLISH", "sluice:wake:" + model, ""},
		{"EXEC"},
	})
	if err != nil {
		return "", err
	}
	for _, done := range replies[len(replies)-1].([]reply) {
		if refused, is := done.(redisError); is {
			return "", refused
		}
	}
	return id, nil
}

// serverTime returns the server's clock in Unix milliseconds: with a clock that is ahead, a job would be delayed.
func serverTime(redis *connection) (int64, error) {
	answer, err := redis.command("TIME")
	if err != nil {
		return 0, err
	}
	parts := answer.([]reply)
	seconds, err := strconv.ParseInt(parts[0].(string), 10, 64)
	if err != nil {
		return 0, err
	}
	microseconds, err := strconv.ParseInt(parts[1].(string), 10, 64)
	return seconds*1000 + microseconds/1000, err
}

func newID() string {
	bytes := make([]byte, 16)
	if _, err := rand.Read(bytes); err != nil {
		panic(err)
	}
	return hex.EncodeToString(bytes)
}

// Cancel asks for the end of a job; its stream then ends with `cancelled`, unless it has just ended otherwise.
func Cancel(redis *connection, id string) error {
	_, err := redis.pipeline([][]string{
		{"SET", "sluice:cancel:" + id, "1", "EX", "3600"},
		{"PUBLISH", "sluice:control", id},
	})
	return err
}

// Result returns the stored result of a job that has ended: a chat.completion, or its event `failed` or `cancelled`.
// It is "null" for any other job.
func Result(redis *connection, id string) (string, error) {
	stored, err := redis.command("GET", "sluice:result:"+id)
	if stored == nil {
		return "null", err
	}
	return stored.(string), err
}

// Stream calls `emit` with each event of a job whose seq is above `after`, once and in order, up to the final one. A
// lost connection is replaced, and the stream continues after the last event. It ends early with emit's error.
func Stream(address, id string, after int, emit func(Event) error) error {
	s := &stream{id: id, next: after + 1, emit: emit}
	lostSince := time.Time{}
	for {
		before := s.next
		err := s.follow(address)
		if err == nil || errors.Is(err, errUnknownJob) || s.stopped {
			return err
		}
		if lostSince.IsZero() || s.next > before {
			lostSince = time.Now()
		}
		if time.Since(lostSince) > outage {
			return err
		}
		time.Sleep(200 * time.Millisecond)
	}
}

type stream struct {
	id      string
	next    int // seq of the next event
	emit    func(Event) error
	ended   bool // the final event was emitted
	stopped bool // emit returned an error
}

// follow subscribes first and then reads the list: together they have every event. It returns nil after the final one.
func (s *stream) follow(address string) error {
	redis, err := open(address)
	if err != nil {
		return err
	}
	defer redis.Close()
	subscriber, err := open(address)
	if err != nil {
		return err
	}
	defer subscriber.Close()
	if _, err := subscriber.command("SUBSCRIBE", "sluice:ch:"+s.id); err != nil { // returns with the acknowledgement
		return err
	}
	messages, lost := make(chan string), make(chan error, 1)
	done := make(chan struct{})
	defer close(done)
	go receiveMessages(subscriber, messages, lost, done)
	return s.merge(redis, messages, lost)
}

// receiveMessages sends the payload of each message, and the error that ended the connection.
func receiveMessages(subscriber *connection, messages chan<- string, lost chan<- error, done <-chan struct{}) {
	subscriber.SetDeadline(time.Time{})
	for {
		answer, err := subscriber.receive()
		if err != nil {
			lost <- err
			return
		}
		if parts, is := answer.([]reply); is && len(parts) == 3 && parts[0] == "message" {
			select {
			case messages <- parts[2].(string):
			case <-done:
				return
			}
		}
	}
}

func (s *stream) merge(redis *connection, messages <-chan string, lost <-chan error) error {
	seen := time.Now()
	if err := s.readList(redis, &seen); err != nil {
		return err
	}
	for !s.ended {
		select {
		case message := <-messages:
			gap, err := s.take(message)
			if err == nil && gap {
				err = s.readList(redis, &seen)
			}
			if err != nil {
				return err
			}
		case <-time.After(silence):
			if err := s.readList(redis, &seen); err != nil {
				return err
			}
		case err := <-lost:
			return err
		}
	}
	return nil
}

// readList takes what the list has from the next event on. `seen` is when there was a trace of the job last.
func (s *stream) readList(redis *connection, seen *time.Time) error {
	list, err := redis.command("LRANGE", "sluice:log:"+s.id, strconv.Itoa(s.next), "-1")
	if err != nil {
		return err
	}
	for _, item := range list.([]reply) {
		if _, err := s.take(item.(string)); err != nil {
			return err
		}
	}
	known, err := redis.command("EXISTS", "sluice:log:"+s.id, "arq:job:"+s.id)
	if err != nil {
		return err
	}
	if known != int64(0) {
		*seen = time.Now()
	} else if time.Since(*seen) > unknown {
		return fmt.Errorf("%w: %s", errUnknownJob, s.id)
	}
	return nil
}

// take emits an event if it is the next one, and drops one that was seen. It reports a gap before it.
func (s *stream) take(message string) (gap bool, err error) {
	event := Event{JSON: message}
	if err := json.Unmarshal([]byte(message), &event); err != nil {
		return false, err
	}
	if s.ended || event.Seq != s.next {
		return event.Seq > s.next, nil
	}
	s.next++
	s.ended = event.Final()
	if err := s.emit(event); err != nil {
		s.stopped = true
		return false, err
	}
	return false, nil
}
