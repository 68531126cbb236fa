package main

// A small Redis client over a socket (RESP2), so that the example needs no module. In a backend of yours, use the
// client library that you have: nothing here is particular to Sluice.

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"
)

const timeout = 5 * time.Second // for connecting, and for the reply to a command

// A reply is a string, an int64, a []reply, a redisError, or nil.
type reply = any

type redisError string

func (e redisError) Error() string { return string(e) }

// connection to a server, used by one goroutine at a time.
type connection struct {
	net.Conn
	reader *bufio.Reader
}

// open connects, logs in and selects the database of a redis:// or rediss:// URL.
func open(address string) (*connection, error) {
	where, err := url.Parse(address)
	if err != nil {
		return nil, errors.New("the URL of the server cannot be read")
	}
	socket, err := dial(where)
	if err != nil {
		return nil, err
	}
	c := &connection{socket, bufio.NewReader(socket)}
	if err := c.logIn(where); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func dial(where *url.URL) (net.Conn, error) {
	port := where.Port()
	if port == "" {
		port = "6379"
	}
	host := net.JoinHostPort(where.Hostname(), port)
	dialer := &net.Dialer{Timeout: timeout}
	if where.Scheme == "rediss" {
		return tls.DialWithDialer(dialer, "tcp", host, nil)
	}
	return dialer.Dial("tcp", host)
}

func (c *connection) logIn(where *url.URL) error {
	if secret, given := where.User.Password(); given {
		user := where.User.Username()
		if user == "" {
			user = "default"
		}
		if _, err := c.command("AUTH", user, secret); err != nil {
			return err
		}
	}
	database := strings.TrimPrefix(where.Path, "/")
	if database == "" || database == "0" {
		return nil
	}
	_, err := c.command("SELECT", database)
	return err
}

// command sends a command and returns its reply.
func (c *connection) command(words ...string) (reply, error) {
	replies, err := c.pipeline([][]string{words})
	if err != nil {
		return nil, err
	}
	return replies[0], nil
}

// pipeline sends commands in one write and returns their replies, or the first error among them.
func (c *connection) pipeline(commands [][]string) ([]reply, error) {
	var request strings.Builder
	for _, words := range commands {
		fmt.Fprintf(&request, "*%d\r\n", len(words))
		for _, word := range words {
			fmt.Fprintf(&request, "$%d\r\n%s\r\n", len(word), word)
		}
	}
	c.SetDeadline(time.Now().Add(timeout))
	if _, err := io.WriteString(c, request.String()); err != nil {
		return nil, err
	}
	var replies []reply
	for range commands {
		answer, err := c.receive()
		if err != nil {
			return nil, err
		}
		if refused, is := answer.(redisError); is {
			return nil, refused
		}
		replies = append(replies, answer)
	}
	return replies, nil
}

// receive reads the next reply.
func (c *connection) receive() (reply, error) {
	line, err := c.reader.ReadString('\n')
	if err != nil {
		return nil, err
	}
	if len(line) < 3 {
		return nil, errors.New("the server does not speak RESP")
	}
	kind, text := line[0], line[1:len(line)-2]
	switch kind {
	case '+':
		return text, nil
	case '-':
		return redisError(text), nil
	}
	number, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return nil, err
	}
	switch {
	case kind == ':':
		return number, nil
	case number < 0:
		return nil, nil
	case kind == '$':
		return c.receiveBulk(number)
	}
	return c.receiveArray(number)
}

func (c *connection) receiveBulk(length int64) (reply, error) {
	bytes := make([]byte, length+2)
	if _, err := io.ReadFull(c.reader, bytes); err != nil {
		return nil, err
	}
	return string(bytes[:length]), nil
}

func (c *connection) receiveArray(length int64) (reply, error) {
	items := make([]reply, 0, length)
	for int64(len(items)) < length {
		item, err := c.receive()
		if err != nil {
			return nil, err
		}
		items = append(items, item)
	}
	return items, nil
}
